"""CUDA C++ kernels on the CPU: plain, and under sanitizers that see every access.

The sources stay as nvcc reads them. `build.py` compiles them with GCC and the headers of this folder::

    from cuda_emulation import build

    if reason := build.missing():  # no g++, no CUDA headers, ...
        pytest.skip(reason)
    path = build.build(["csrc/cuda/x.cu", "csrc/bindings_cuda.cpp"], name="_cuda", kind="module", includes=["csrc"])
    module = build.load_module(path)
    module.x(tensor.data_ptr(), out.data_ptr(), tensor.numel(), 0)  # CPU tensors, and any integer as a stream

A kernel that deadlocks, or breaks the rules of barriers and warp operations, raises RuntimeError with the place in the
source. `CUDA_EMULATION_ORDER`, read at each launch, is the order in which the threads of a block run: forward,
backward, or a number that random orders start from. After `build.fail_next_launch(module, error)` the next launch
leaves that error behind instead of running.

A module with `sanitizer="bytes"` counts the bytes that its kernels move; see `byte_counts.cpp`.

A module with `sanitizer="address"` or `"thread"` needs a process that loads the sanitizer before Python;
`build.preloaded` is its environment. By hand, for tests that build their module that way::

    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" \\
        ASAN_OPTIONS=detect_leaks=0 pytest tests/test_x.py
    LD_PRELOAD="$(g++ -print-file-name=libtsan.so) $(g++ -print-file-name=libstdc++.so)" \\
        TSAN_OPTIONS=ignore_noninstrumented_modules=1 pytest tests/test_x.py

AddressSanitizer knows the ends of tensors that were allocated after it was loaded, and of shared variables.
ThreadSanitizer finds a race whatever the order was, but is slow: some blocks are enough. `CUDA_EMULATION_THREADS` sets
how many blocks run at a time; blocks that take turns on one OS thread never race.
"""
