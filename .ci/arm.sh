# Part `arm` of .ci/run, which includes this file: the library cross-built for 64-bit Arm, its wheel, and tests in an emulator.
#
# build/ci/arm/ gets root/ (Python and the C library of Debian's arm64), the Python packages in it, wheel/ (with all kernels, where part
# readme of the same run compiled them), and bin/: `python`, and a `cc` and a `c++` whose programs run in the emulator.
ARM=$WORK/arm
# What depends on the processor and its compiler, in a few minutes of emulation.
ARM_TESTS=(tests/capi/test_{header,symbols,struct_version,info,accepted}.py tests/problem tests/test_vector_functions.py
    tests/test_neon.py)

part_arm() {
    if ! arm_tools; then
        [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null || return
        echo "left out: aarch64-linux-gnu-g++ or qemu-aarch64 is missing, and this is not root on Debian"
        return 0
    fi
    build_tools && with_packages builder && arm_root && arm_python && arm_programs && arm_cuda_compiler || return
    arm_wheel && arm_cuda || return
    python3 tests/arm/instruction_counts.py "$ARM/build/libflash.so" || return
    # In one run, because each emulated process takes long to start; test_exact.py with the kernels of one instruction set.
    PATH="$PWD/$ARM/bin:$PATH" PYTHONPATH=tests/support "$ARM/bin/python" -m pytest -q -p no:cacheprovider -n "$JOBS" -p passed_tests \
        --write-passed "$ARM/passed" "${ARM_TESTS[@]}" tests/test_exact.py -k 'not test_exact.py or neonbf16' &&
        grep -q 'test_exact\.py.*neonbf16' "$ARM/passed"
}

arm_tools() {
    local tool missing=
    for tool in aarch64-linux-gnu-g++ qemu-aarch64 cc; do command -v "$tool" > /dev/null || missing=1; done
    [ -n "$missing" ] || return 0
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || return
    apt-get -q update && apt-get -qy install --no-install-recommends g++-aarch64-linux-gnu qemu-user
}

# The wheel, with the Python of this machine as the one that builds. A Python of Debian includes a header of arm64's. With the kernels where
# part readme has compiled them: what the compiler makes for the GPU is the same as on x86-64, which arm_cuda() looks at.
arm_wheel() {
    local cuda=off defines=$RELEASE
    rm -rf "$ARM/wheel" "$ARM/build"
    if [ -n "$ARM_NVCC" ] && [ -f "$WORK/readme/build.log" ]; then
        cuda=on
        defines+=";CMAKE_CUDA_COMPILER=$ARM_NVCC;CMAKE_SHARED_LINKER_FLAGS=-L$ARM_CUDA_LIBRARIES;CMAKE_CXX_FLAGS=-isystem $ARM_CUDA_HEADERS"
        defines+=";CMAKE_CUDA_COMPILER_LAUNCHER=$PWD/.ci/nvcc_host_code.py"
    fi
    _PYTHON_HOST_PLATFORM=linux-aarch64 CMAKE_TOOLCHAIN_FILE=$PWD/.ci/aarch64.cmake LIBFLASH_KEPT=$PWD/$WORK/readme/kept \
        CFLAGS="-idirafter $PWD/$ARM/root/usr/include" SKBUILD_BUILD_DIR=$PWD/$ARM/build SKBUILD_CMAKE_DEFINE=$defines \
        LIBFLASH_CUDA=$cuda "$WORK/builder/bin/pip" wheel -q --no-deps -w "$ARM/wheel" . || return
    manylinux "$ARM/wheel" && wheel_is_small "$ARM"/wheel/*.whl && arm_pip --no-deps --platform manylinux_2_28_aarch64 "$ARM"/wheel/*.whl
}

# Debian's Python for arm64 in root/, by package lists of its own, so that nothing of this machine changes.
arm_root() {
    local apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root
        -o Dir::State="$PWD/$ARM/apt/state" -o Dir::Cache="$PWD/$ARM/apt/cache" -o Dir::State::status=/dev/null)
    local package
    rm -rf "$ARM/root"
    mkdir -p "$ARM/root/usr/"{bin,lib,sbin} "$ARM/apt/state/lists/partial" "$ARM/apt/cache/archives/partial"
    ln -s usr/bin usr/lib usr/sbin "$ARM/root/"
    "${apt[@]}" update || true  # of several sources one may not have arm64
    "${apt[@]}" install -y --download-only --no-install-recommends python3 libpython3-dev libstdc++6 libubsan1 || return
    for package in "$ARM"/apt/cache/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -x -C "$ARM/root" --keep-directory-symlink || return
    done
}

# What the tests need, from the package index.
arm_python() {
    arm_pip --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
        'numpy>=2' 'ml_dtypes>=0.5' 'pytest>=8' 'pytest-xdist>=3.6' || return
    echo "import sys; sys.executable = '$PWD/$ARM/bin/python'" > "$ARM/root/usr/lib/python3/dist-packages/emulated.pth"
}

# Installs into the Python in root/.
arm_pip() {
    local version
    version=$(readlink "$ARM/root/usr/bin/python3") || return
    "$WORK/builder/bin/pip" install -q --upgrade --target "$ARM/root/usr/lib/python3/dist-packages" --only-binary=:all: \
        --implementation cp --python-version "${version#python}" "$@"
}

# Sets ARM_NVCC, or leaves it empty, and where the headers and, for Arm, the CUDA runtime are: nvcc looks for them in folders that its own
# machine's toolkit lacks.
arm_cuda_compiler() {
    local runtime=$PWD/$ARM/cuda_runtime
    ARM_NVCC=$(command -v nvcc) || ARM_NVCC=$(find "$PWD/$WORK/nvcc" -path '*/bin/nvcc' -print -quit 2> /dev/null)
    if [ "${LIBFLASH_CI_CUDA:-on}" = off ] || [ -z "$ARM_NVCC" ]; then
        echo "CUDA left out: no nvcc, or LIBFLASH_CI_CUDA=off"
        ARM_NVCC=
        return
    fi
    ARM_CUDA_HEADERS=$("$ARM_NVCC" --dryrun -x cu - 2>&1 < /dev/null | sed -n 's/^#\$ TOP=//p')/include
    ARM_CUDA_LIBRARIES=$runtime/nvidia/cu13/lib
    export NVCC_PREPEND_FLAGS="-I$ARM_CUDA_HEADERS -L$ARM_CUDA_LIBRARIES"
    rm -rf "$runtime"
    "$WORK/builder/bin/pip" install -q --target "$runtime" --no-deps --only-binary=:all: --platform manylinux_2_17_aarch64 \
        --platform manylinux2014_aarch64 "$(group cuda-build | grep runtime)"
}

# One source compiled for Arm without the kernels of part readme, whose PTX must be the same; the library of the wheel, or one with that
# source alone, loads in the emulator.
arm_cuda() {
    [ -n "$ARM_NVCC" ] || return 0
    local library=$ARM/cuda/libflash.so kept=$WORK/readme/kept made=$ARM/cuda/kept ptx found=
    rm -rf "$ARM/cuda"
    mkdir -p "$made"
    cmake -S . -B "$ARM/cuda" -G Ninja --toolchain "$PWD/.ci/aarch64.cmake" -DCMAKE_CUDA_COMPILER="$ARM_NVCC" -DLIBFLASH_CUDA=on \
        -DLIBFLASH_KERNELS=^merge -DCMAKE_BUILD_TYPE=Debug -DLIBFLASH_COMPILER_KNOWS_NEON=OFF -DLIBFLASH_COMPILER_KNOWS_NEONBF16=OFF \
        -DCMAKE_SHARED_LINKER_FLAGS="-L$ARM_CUDA_LIBRARIES" -DCMAKE_CXX_FLAGS="-isystem $ARM_CUDA_HEADERS" \
        -DCMAKE_CUDA_FLAGS="-DNDEBUG --keep --keep-dir=$PWD/$made" || return
    if [ -f "$WORK/readme/build.log" ]; then
        library=$ARM/build/libflash.so
        cmake --build "$ARM/cuda" --target libflash_cuda_any || return
        for ptx in "$made"/merge*.ptx; do cmp "$ptx" "$kept/${ptx##*/}" && found=1 || return; done
        [ -n "$found" ] && echo "compiled for Arm, merge has the PTX of x86-64"
    else
        cmake --build "$ARM/cuda"
    fi && "$ARM/bin/python" - "$library" << 'CHECK'
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.flash_cuda_state.restype = library.flash_build_info.restype = ctypes.c_char_p
print(library.flash_build_info().decode(), "cuda state:", library.flash_cuda_state().decode(), "kernels:", library.flash_kernel_count())
assert b"cuda architectures: 80" in library.flash_build_info() and library.flash_kernel_count() > 0
CHECK
}

# Programs that run here: an emulated Python, and compilers that put the emulator before each program they link.
arm_programs() {
    local name root=$PWD/$ARM/root
    mkdir -p "$ARM/bin"
    export QEMU_CPU=max,sve=off  # Python starts faster without SVE, which the library does not use
    printf '#!/bin/sh\nexec qemu-aarch64 -L %s %s/usr/bin/python3 "$@"\n' "$root" "$root" > "$ARM/bin/python"
    for name in cc:gcc c++:g++; do
        sed "s/COMPILER/aarch64-linux-gnu-${name#*:}/" > "$ARM/bin/${name%:*}" << 'WRAPPER'
#!/bin/bash
COMPILER "$@" || exit
program=
for ((i = 1; i < $#; ++i)); do [ "${!i}" != -o ] || { ((j = i + 1)); program=${!j}; }; done
case " $* " in *" -c "* | *" -shared "* | *" -E "* | *" -S "*) exit ;; esac
[ -n "$program" ] && [ -x "$program" ] || exit 0
mv "$program" "$program.aarch64"
printf '#!/bin/sh\nexec qemu-aarch64 -L /usr/aarch64-linux-gnu "%s" "$@"\n' "$(realpath "$program.aarch64")" > "$program"
chmod +x "$program"
WRAPPER
    done
    chmod +x "$ARM"/bin/*
    for name in nm readelf; do ln -sf "$(command -v aarch64-linux-gnu-$name)" "$ARM/bin/$name"; done
}
