// Decode: the result of a valid call is compared with the scalar reference, its cache bit for bit; an invalid call must be
// refused and change nothing.
#include "decode_case.h"
#include "kernels.h"
#include "target.h"

namespace fuzz {
namespace {

constexpr DecodeRole kWritten[] = {kDecodeOut, kDecodeLse, kKCache, kVCache};

struct Outputs {
    Tensor tensor[kDecodeRoles];

    Outputs(const DecodeCase& problem, DecodeCall& call) {
        for (const DecodeRole role : kWritten) {
            if (!call.given[role]) continue;
            tensor[role].allocate(problem.tensor[role].view, static_cast<int64_t>(problem.tensor[role].lead_bytes()) /
                                                                 bytes_of(problem.tensor[role].view.dtype));
            tensor[role].copy_bytes(problem.tensor[role]);
            call.view[role] = tensor[role].view;
        }
    }
};

void run(DecodeCall& call, const char* kernel, int fill) {
    call.options.kernel = kernel;
    call.bind();
    size_t bytes = 0;
    check_status(call.workspace_size(&bytes), FLASH_STATUS_OK, "workspace_size");
    const Workspace workspace(bytes, fill);
    check_status(call.run(workspace.data(), bytes), FLASH_STATUS_OK, "decode");
}

void compare(const DecodeCase& problem, DecodeCall call, const char* kernel, Bytes& bytes) {
    DecodeCall reference_call = call;
    const Outputs got(problem, call), reference(problem, reference_call);
    run(reference_call, "decode_cpu_scalar", 0);
    run(call, kernel, bytes.byte());
    const Rounding rounding(problem.dtype);
    const ErrorBounds bounds(rounding, problem.magnitudes);
    check_close(got.tensor[kDecodeOut], reference.tensor[kDecodeOut], rounding.u, bounds.o, "out");
    check_close(got.tensor[kDecodeLse], reference.tensor[kDecodeLse], rounding.sums, bounds.lse, "lse");
    FUZZ_CHECK(got.tensor[kKCache].bytes() == reference.tensor[kKCache].bytes(), "the caches of keys differ");
    FUZZ_CHECK(got.tensor[kVCache].bytes() == reference.tensor[kVCache].bytes(), "the caches of values differ");
}

void refuse(DecodeCase& problem, DecodeCall call, Bytes& bytes) {
    flash_status_t expected = FLASH_STATUS_OK;
    const std::string what = invalidate(problem, call, bytes, &expected);
    if (what.empty()) return;
    std::vector<char> before[kDecodeRoles];
    for (int role = 0; role < kDecodeRoles; ++role)
        if (problem.tensor[role].present()) before[role] = problem.tensor[role].bytes();
    call.bind();
    size_t needed = 0;
    call.workspace_size(&needed);  // may accept the call: it reads no data
    const Workspace workspace(size_t{1} << 16);
    check_status(call.run(workspace.data(), size_t{1} << 16), expected, what.c_str());
    for (int role = 0; role < kDecodeRoles; ++role)
        FUZZ_CHECK(problem.tensor[role].holds(before[role]), "tensor %d was written by a refused call: %s", role, what.c_str());
}

}  // namespace

void decode_target(Bytes& bytes) {
    static const std::vector<std::string> kernels = usable_kernels("decode");
    DecodeCase problem(bytes);
    const DecodeCall call = problem.call();
    if (bytes.chance(128)) return refuse(problem, call, bytes);
    compare(problem, call, pick_kernel(kernels, bytes), bytes);
}

}  // namespace fuzz
