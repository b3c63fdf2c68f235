#include "check.h"

#include <exception>
#include <vector>

namespace {

struct Test {
  std::string part, name;
  std::function<void()> body;
};

std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

}  // namespace

Registered::Registered(const char* part, const char* name, std::function<void()> body) {
  tests().push_back({part, name, std::move(body)});
}

std::string thrownBy(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Runs the tests of the named part, or all.
int main(int count, char** arguments) {
  int ran = 0;
  for (const auto& test : tests()) {
    if (count > 1 && test.part != arguments[1]) continue;
    std::printf("%s.%s\n", test.part.c_str(), test.name.c_str());
    std::fflush(stdout);
    test.body();
    ran++;
  }
  return ran > 0 ? 0 : 2;
}
