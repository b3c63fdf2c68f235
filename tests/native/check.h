// A very small test runner: tests register themselves by part and name; a failed check ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

struct Registered {
  Registered(const char* part, const char* name, std::function<void()> body);
};

#define TEST(part, name)                                                    \
  static void part##_##name();                                              \
  static const Registered reg_##part##_##name(#part, #name, part##_##name); \
  static void part##_##name()

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                               \
    }                                                                              \
  } while (false)

// The message of the exception that the call throws; empty if it throws none.
std::string thrownBy(const std::function<void()>& call);
