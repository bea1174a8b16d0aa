# metalmm.metallib beside the module: the shaders compiled ahead of time, so that the first use of a
# kernel does not wait for the compiler. Only where Xcode's Metal compiler is installed: without it the
# engine compiles the same shaders when they are used, as it does with those that the compiler rejects.
#
# METAL_COMPILER        the compiler; empty: none (-DMETAL_COMPILER= leaves the library out)
# METAL_STRICT          ON for CI: a rejected shader and a warning fail the build. Not for users, whose
#                       compiler may be newer than ours

find_program(XCRUN xcrun)
if(NOT DEFINED METAL_COMPILER AND XCRUN)
  # xcrun finds a compiler that then says it is not installed: ask for its version.
  execute_process(COMMAND ${XCRUN} -sdk macosx metal --version
    RESULT_VARIABLE METAL_IS_MISSING OUTPUT_QUIET ERROR_QUIET)
  if(METAL_IS_MISSING EQUAL 0)
    set(METAL_COMPILER ${XCRUN} -sdk macosx metal)
  endif()
endif()
if(NOT METAL_COMPILER)
  message(STATUS "No Metal compiler: kernels are compiled when they are first used")
  file(REMOVE ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/metalmm.metallib)  # left by an earlier build
  return()
endif()

if(METAL_STRICT)
  set(METAL_STRICT_FLAG --strict)
endif()
set(METALLIB ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/metalmm.metallib)
# No file where every shader is rejected: then the next build tries again.
add_custom_command(OUTPUT ${METALLIB}
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/metallib.py ${METALLIB}
    --compiler "${METAL_COMPILER}" ${METAL_STRICT_FLAG}
  DEPENDS ${SHADERS} cmake/metallib.py VERBATIM)
add_custom_target(metallib ALL DEPENDS ${METALLIB})
