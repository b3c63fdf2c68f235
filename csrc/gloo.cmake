# The target gloo from ${GLOO_SOURCE}: static, without the transports, stores and libraries that the engine has no use for.
file(STRINGS "${GLOO_SOURCE}/CMakeLists.txt" versions REGEX "set\\(GLOO_VERSION_(MAJOR|MINOR|PATCH) ")
foreach(line IN LISTS versions)
  string(REGEX MATCH "(GLOO_VERSION_[A-Z]+) ([0-9]+)" found "${line}")
  set(${CMAKE_MATCH_1} ${CMAKE_MATCH_2})
endforeach()
configure_file("${GLOO_SOURCE}/gloo/config.h.in" "${CMAKE_BINARY_DIR}/gloo/gloo/config.h")

set(gloo_sources allgatherv allreduce barrier broadcast context types common/logging transport/address
  transport/buffer transport/context transport/device transport/pair transport/unbound_buffer)
list(TRANSFORM gloo_sources PREPEND "${GLOO_SOURCE}/gloo/")
list(TRANSFORM gloo_sources APPEND ".cc")
add_library(gloo STATIC ${gloo_sources})
target_include_directories(gloo SYSTEM PUBLIC "${GLOO_SOURCE}" "${CMAKE_BINARY_DIR}/gloo")
target_link_libraries(gloo PUBLIC Threads::Threads)
