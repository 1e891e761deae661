// cuBLASLt for the fake driver: the functions that this project calls, with plain arithmetic in double, queued in the fake
// driver's streams. It refuses what NVIDIA's manual does not allow: layouts that do not fit each other, addresses that are not
// aligned as was promised, an algorithm of another shape, a workspace that is too small. It writes over the workspace.
//
// It proves nothing about the real library's choice of algorithms, rounding and accepted arguments.
#include "fake.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { R_32F = 0, R_16F = 2, R_16BF = 14 };
enum Compute { COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77 };

struct Counts {
    uint64_t handles, descriptors, matmuls, heuristics, misuse;
};

struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t ld;
};

struct Operation {
    int compute, scale;
    int transpose_a = 0, transpose_b = 0;
};

struct Preference {
    uint64_t workspace_bytes = 0;
    uint32_t alignment[4] = {256, 256, 256, 256};
};

struct Algorithm {
    uint64_t data[8];
};

struct Result {
    Algorithm algorithm;
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

struct State {
    std::mutex lock;
    Counts counts{};
    uint64_t version = 130002;
    std::string fail_function;
    uint64_t fail_after = 0;
    int fail_status = 0;
    std::set<void*> alive;
};

State& state() {
    static State* s = new State;
    return *s;
}

template <typename F>
F driver(const char* name) {
    void* library = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* function = library ? dlsym(library, name) : nullptr;
    if (function == nullptr) {
        fprintf(stderr, "fake cuBLASLt: the fake driver is not there: %s\n", name);
        abort();
    }
    return reinterpret_cast<F>(function);
}

int refused(const char* function) {
    State& s = state();
    if (s.fail_after > 0 && s.fail_function == function && --s.fail_after == 0) return s.fail_status;
    return SUCCESS;
}

int misuse() {
    state().counts.misuse++;
    return INVALID_VALUE;
}

template <typename T>
T* alive(void* at) {
    return state().alive.count(at) ? static_cast<T*>(at) : nullptr;
}

template <typename T>
int made(void** out, T* value) {
    state().alive.insert(value);
    state().counts.descriptors++;
    *out = value;
    return SUCCESS;
}

template <typename T>
int gone(void* at) {
    std::lock_guard<std::mutex> guard(state().lock);
    if (state().alive.erase(at) == 0) return misuse();
    state().counts.descriptors--;
    delete static_cast<T*>(at);
    return SUCCESS;
}

size_t bytes_of(int type) { return type == R_32F ? 4 : 2; }

// Column-major matrices: op(A) is m by k, op(B) k by n, D is m by n.
bool fits(const Operation& op, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
    uint64_t m = op.transpose_a ? a.cols : a.rows, k = op.transpose_a ? a.rows : a.cols;
    uint64_t kb = op.transpose_b ? b.cols : b.rows, n = op.transpose_b ? b.rows : b.cols;
    bool shapes = k == kb && d.rows == m && d.cols == n && memcmp(&c, &d, sizeof(c)) == 0;
    for (const Layout* l : {&a, &b, &d}) shapes = shapes && l->ld >= static_cast<int64_t>(l->rows) && l->rows && l->cols;
    bool types = a.type == b.type && d.type == R_32F && op.scale == R_32F &&
                 (op.compute == COMPUTE_32F || (op.compute == COMPUTE_32F_FAST_TF32 && a.type == R_32F));
    return shapes && types;
}

uint64_t sum_of(const Operation& op, const Layout& a, const Layout& b, const Layout& d) {
    uint64_t sum = 0x9E3779B97F4A7C15ull;
    for (uint64_t x : {uint64_t(op.compute), uint64_t(op.transpose_a), uint64_t(op.transpose_b), uint64_t(a.type), a.rows, a.cols,
                       uint64_t(a.ld), b.rows, b.cols, uint64_t(b.ld), d.rows, d.cols, uint64_t(d.ld)}) {
        sum = (sum ^ x) * 0x100000001B3ull;
    }
    return sum;
}

float widen(const void* from, int type, uint64_t i, bool tf32) {
    if (type == R_32F) {
        float x = static_cast<const float*>(from)[i];
        if (!tf32) return x;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFFu;
        memcpy(&x, &bits, 4);
        return x;
    }
    uint16_t half = static_cast<const uint16_t*>(from)[i];
    if (type == R_16BF) {
        uint32_t bits = uint32_t(half) << 16;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
    int exponent = half >> 10 & 31, fraction = half & 1023;
    float x = exponent == 31 ? (fraction ? NAN : INFINITY)
                             : ldexpf(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
    return half & 0x8000 ? -x : x;
}

struct Work {
    Operation op;
    Layout a, b, d;
    const void *at_a, *at_b;
    float *at_c, *at_d;
    float alpha, beta;
    void* workspace;
    size_t workspace_bytes;
};

uint64_t extent(const Layout& l) { return ((l.cols - 1) * l.ld + l.rows) * bytes_of(l.type); }

void run(void* context) {
    const Work& w = *static_cast<Work*>(context);
    auto usable = driver<int (*)(uint64_t, uint64_t)>("lagoon_fake_usable");
    auto may = [&](const void* at, uint64_t bytes) { return usable(reinterpret_cast<uint64_t>(at), bytes); };
    if (!may(w.at_a, extent(w.a)) || !may(w.at_b, extent(w.b)) || !may(w.at_d, extent(w.d)) ||
        (w.workspace_bytes && !may(w.workspace, w.workspace_bytes))) {
        return;
    }
    if (w.workspace_bytes) memset(w.workspace, 0xFF, w.workspace_bytes);
    const bool tf32 = w.op.compute == COMPUTE_32F_FAST_TF32;
    const uint64_t depth = w.op.transpose_a ? w.a.rows : w.a.cols;
    for (uint64_t j = 0; j < w.d.cols; j++) {
        for (uint64_t i = 0; i < w.d.rows; i++) {
            double sum = 0;
            for (uint64_t k = 0; k < depth; k++) {
                uint64_t a = w.op.transpose_a ? i * w.a.ld + k : k * w.a.ld + i;
                uint64_t b = w.op.transpose_b ? k * w.b.ld + j : j * w.b.ld + k;
                sum += double(widen(w.at_a, w.a.type, a, tf32)) * widen(w.at_b, w.b.type, b, tf32);
            }
            const uint64_t to = j * w.d.ld + i;
            w.at_d[to] = static_cast<float>(w.alpha * sum + (w.beta == 0 ? 0.0 : double(w.beta) * w.at_c[to]));
        }
    }
}

void drop(void* context) { delete static_cast<Work*>(context); }

} // namespace

#define ENTER(name)                                                                                                    \
    std::lock_guard<std::mutex> guard(state().lock);                                                                   \
    if (int status = refused(name); status != SUCCESS) return status

extern "C" {

void lagoon_fake_blas_version(uint64_t version) { state().version = version; }

void lagoon_fake_blas_fail(const char* function, uint64_t nth, int status) {
    std::lock_guard<std::mutex> guard(state().lock);
    state().fail_function = function;
    state().fail_after = nth;
    state().fail_status = status;
}

void lagoon_fake_blas_counts(Counts* counts) {
    std::lock_guard<std::mutex> guard(state().lock);
    *counts = state().counts;
}

size_t cublasLtGetVersion() { return state().version; }

int cublasLtCreate(void** out) {
    ENTER("cublasLtCreate");
    *out = new int;
    state().alive.insert(*out);
    state().counts.handles++;
    return SUCCESS;
}

int cublasLtDestroy(void* handle) {
    std::lock_guard<std::mutex> guard(state().lock);
    if (state().alive.erase(handle) == 0) return misuse();
    state().counts.handles--;
    delete static_cast<int*>(handle);
    return SUCCESS;
}

int cublasLtMatmulDescCreate(void** out, int compute, int scale) {
    ENTER("cublasLtMatmulDescCreate");
    return made(out, new Operation{compute, scale});
}
int cublasLtMatmulDescDestroy(void* at) { return gone<Operation>(at); }

int cublasLtMatmulDescSetAttribute(void* at, int attribute, const void* value, size_t bytes) {
    ENTER("cublasLtMatmulDescSetAttribute");
    Operation* op = alive<Operation>(at);
    if (op == nullptr || bytes != sizeof(int) || (attribute != 3 && attribute != 4)) return misuse();
    int number = *static_cast<const int*>(value);
    if (number != 0 && number != 1) return misuse();
    (attribute == 3 ? op->transpose_a : op->transpose_b) = number;
    return SUCCESS;
}

int cublasLtMatrixLayoutCreate(void** out, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    ENTER("cublasLtMatrixLayoutCreate");
    if (type != R_32F && type != R_16F && type != R_16BF) return misuse();
    return made(out, new Layout{type, rows, cols, ld});
}
int cublasLtMatrixLayoutDestroy(void* at) { return gone<Layout>(at); }

int cublasLtMatmulPreferenceCreate(void** out) {
    ENTER("cublasLtMatmulPreferenceCreate");
    return made(out, new Preference);
}
int cublasLtMatmulPreferenceDestroy(void* at) { return gone<Preference>(at); }

int cublasLtMatmulPreferenceSetAttribute(void* at, int attribute, const void* value, size_t bytes) {
    ENTER("cublasLtMatmulPreferenceSetAttribute");
    Preference* preference = alive<Preference>(at);
    if (preference == nullptr) return misuse();
    if (attribute == 1 && bytes == 8) {
        memcpy(&preference->workspace_bytes, value, 8);
    } else if (attribute >= 5 && attribute <= 8 && bytes == 4) {
        memcpy(&preference->alignment[attribute - 5], value, 4);
    } else {
        return misuse();
    }
    return SUCCESS;
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* op_at, void* a_at, void* b_at, void* c_at, void* d_at,
                                   void* preference_at, int wanted, Result* results, int* count) {
    ENTER("cublasLtMatmulAlgoGetHeuristic");
    Operation* op = alive<Operation>(op_at);
    Layout *a = alive<Layout>(a_at), *b = alive<Layout>(b_at), *c = alive<Layout>(c_at), *d = alive<Layout>(d_at);
    Preference* preference = alive<Preference>(preference_at);
    if (!alive<int>(handle) || !op || !a || !b || !c || !d || !preference || wanted < 1) return misuse();
    state().counts.heuristics++;
    *count = 0;
    if (!fits(*op, *a, *b, *c, *d)) return misuse();
    // Rows of 16 bytes, as the real one wants for its fast kernels; with less it has some, but not in this fake.
    for (const Layout* l : {a, b, d}) {
        if (l->ld * bytes_of(l->type) % preference->alignment[0] != 0) return NOT_SUPPORTED;
    }
    Result& r = results[0];
    memset(&r, 0, sizeof(r));
    r.workspace_bytes = preference->workspace_bytes < (1 << 20) ? 0 : 1 << 16;
    r.algorithm.data[0] = sum_of(*op, *a, *b, *d);
    r.algorithm.data[1] = r.workspace_bytes;
    r.algorithm.data[2] = preference->alignment[0];
    *count = 1;
    return SUCCESS;
}

int cublasLtMatmul(void* handle, void* op_at, const void* alpha, const void* at_a, void* a_at, const void* at_b, void* b_at,
                   const void* beta, const void* at_c, void* c_at, void* at_d, void* d_at, const Algorithm* algorithm,
                   void* workspace, size_t workspace_bytes, void* stream) {
    ENTER("cublasLtMatmul");
    Operation* op = alive<Operation>(op_at);
    Layout *a = alive<Layout>(a_at), *b = alive<Layout>(b_at), *c = alive<Layout>(c_at), *d = alive<Layout>(d_at);
    if (!alive<int>(handle) || !op || !a || !b || !c || !d || !algorithm || !fits(*op, *a, *b, *c, *d)) return misuse();
    if (algorithm->data[0] != sum_of(*op, *a, *b, *d) || workspace_bytes < algorithm->data[1]) return misuse();
    for (const void* at : {at_a, at_b, at_c, static_cast<const void*>(at_d), static_cast<const void*>(workspace)}) {
        if (reinterpret_cast<uint64_t>(at) % algorithm->data[2] != 0) return misuse();
    }
    Work* work = new Work{*op, *a, *b, *d, at_a, at_b, static_cast<float*>(const_cast<void*>(at_c)),
                          static_cast<float*>(at_d), *static_cast<const float*>(alpha), *static_cast<const float*>(beta),
                          workspace, algorithm->data[1]};
    state().counts.matmuls++;
    auto enqueue = driver<int (*)(void*, void (*)(void*), void (*)(void*), void*)>("lagoon_fake_enqueue");
    return enqueue(stream, run, drop, work) == 0 ? SUCCESS : EXECUTION_FAILED;
}

} // extern "C"
