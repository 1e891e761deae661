// The model of a tensor map on the host, for the shim and the fake driver: CUtensorMap is opaque, so the model has a layout
// of its own. Checks are those of the driver's manual for cuTensorMapEncodeTiled, and of the programming guide where it is
// stricter (addresses under a swizzle); features that the kernels do not use are refused.
#pragma once
#include <cstdint>
#include <cstring>

namespace shim {

struct alignas(64) TensorMapModel {
    uint64_t magic;
    uint64_t address;
    // In elements; then bytes from row to row.
    uint64_t columns, rows, stride;
    uint32_t box_columns, box_rows, element_bytes;
    uint32_t unused[19];
};
static_assert(sizeof(TensorMapModel) == 128 && alignof(TensorMapModel) == 64, "as CUtensorMap");

constexpr uint64_t TENSOR_MAP_MAGIC = 0x4c61676f6f6e4d70;
// CUtensorMapDataType and CUtensorMapSwizzle, as far as they are used.
constexpr int TENSOR_MAP_F16 = 6, TENSOR_MAP_BF16 = 9, TENSOR_MAP_SWIZZLE_128 = 3;
constexpr uint64_t TENSOR_MAP_SWIZZLE_BYTES = 128;

// 0, or 1 (CUDA_ERROR_INVALID_VALUE).
inline int encode_tiled(void* out, int type, uint32_t rank, const void* address, const uint64_t* dims, const uint64_t* strides,
                        const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2, int fill) {
    const uint64_t at = reinterpret_cast<uint64_t>(address);
    const uint64_t element_bytes = 2;
    bool good = reinterpret_cast<uint64_t>(out) % 64 == 0 && (type == TENSOR_MAP_F16 || type == TENSOR_MAP_BF16) && rank == 2;
    good = good && interleave == 0 && swizzle == TENSOR_MAP_SWIZZLE_128 && l2 >= 0 && l2 <= 3 && fill == 0;
    for (uint32_t i = 0; good && i < rank; i++) {
        good = dims[i] > 0 && dims[i] <= 1ull << 32 && box[i] > 0 && box[i] <= 256 && element_strides[i] == 1;
    }
    good = good && at % TENSOR_MAP_SWIZZLE_BYTES == 0 && strides[0] % 16 == 0 && strides[0] < 1ull << 40;
    good = good && strides[0] >= dims[0] * element_bytes && box[0] * element_bytes % 16 == 0;
    good = good && box[0] * element_bytes <= TENSOR_MAP_SWIZZLE_BYTES;
    if (!good) return 1;
    const TensorMapModel map = {TENSOR_MAP_MAGIC, at, dims[0], dims[1], strides[0], box[0], box[1], element_bytes, {}};
    memcpy(out, &map, sizeof map);
    return 0;
}

}  // namespace shim
