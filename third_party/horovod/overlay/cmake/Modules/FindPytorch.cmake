# Takes PyTorch's version and folder from setup.py, and finds the rest by its files. To import it takes seconds, and
# all that its CUDA builds load, which need not be installed yet.
#
# Sets Pytorch_INCLUDE_DIRS, Pytorch_LIBRARIES, Pytorch_COMPILE_FLAGS, Pytorch_CUDA and Pytorch_CXX11.

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Pytorch REQUIRED_VARS Pytorch_ROOT VERSION_VAR Pytorch_VERSION)

set(Pytorch_INCLUDE_DIRS "${Pytorch_ROOT}/include" "${Pytorch_ROOT}/include/torch/csrc/api/include")
set(_Pytorch_NAMES c10 torch torch_cpu torch_python)
# Else a toolkit on the machine would decide.
if(NOT "$ENV{HOROVOD_GPU_OPERATIONS}" STREQUAL "" AND EXISTS "${Pytorch_ROOT}/lib/libtorch_cuda.so")
    set(Pytorch_CUDA TRUE)
    list(APPEND Pytorch_INCLUDE_DIRS "$ENV{HOROVOD_CUDA_HOME}/include")
    list(APPEND _Pytorch_NAMES c10_cuda torch_cuda cudart)
endif()
foreach(_NAME IN LISTS _Pytorch_NAMES)
    find_library(Pytorch_LIBRARY_${_NAME} NAMES ${_NAME} HINTS "${Pytorch_ROOT}/lib" "$ENV{HOROVOD_CUDA_HOME}/lib64" REQUIRED)
    list(APPEND Pytorch_LIBRARIES "${Pytorch_LIBRARY_${_NAME}}")
endforeach()
# All wheels of PyTorch 2.7 and later have C++11's strings.
set(Pytorch_CXX11 TRUE)
set(Pytorch_COMPILE_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=1")
