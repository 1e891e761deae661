// Kernels with one mistake each, which the shim must show. They are in no fatbin.
#include "../kernels/shared/bulk.cuh"
#include "../kernels/shared/common.cuh"
#include "../kernels/shared/wgmma.cuh"

// Writes its thread's number to shared memory and reads its neighbour's; `cols` says which mistake is made.
KERNEL(faulty, 64, 1, GatherParams) {
    DYNAMIC_SHARED(shared);
    uint32_t* words = reinterpret_cast<uint32_t*>(shared);
    uint32_t* out = at<uint32_t>(p.out);
    const uint32_t thread = threadIdx.x;
    switch (p.cols) {
        case 0:  // none
            words[thread] = thread;
            sync_block();
            out[thread] = words[(thread + 33) % 64];
            break;
        case 1:  // no barrier between writing and reading
            words[thread] = thread;
            out[thread] = words[(thread + 33) % 64];
            break;
        case 2:  // a barrier for the warp where one for the block is needed
            words[thread] = thread;
            sync_warp();
            out[thread] = words[(thread + 33) % 64];
            break;
        case 3:  // a barrier that not all reach
            if (thread < 40) sync_block();
            break;
        case 4:  // lanes of a warp at different instructions
            if (thread % 2) {
                sync_warp();
            } else {
                out[thread] = static_cast<uint32_t>(shuffle_xor(1.0f, 1));
            }
            break;
        case 5:  // a copy that is not waited for
            copy_async(shared_address(shared + 16 * thread), at<unsigned char>(p.x) + 16 * thread, 16);
            copy_commit();
            out[thread] = words[4 * thread];
            copy_wait<0>();
            break;
        case 6:  // the last byte of shared memory and one more
            out[thread] = shared[p.pad];
            break;
        case 7:  // a copy to an address that is not aligned
            copy_async(shared_address(shared + 4 * thread), at<unsigned char>(p.x), 16);
            break;
        case 8:  // a thread that ends while its copy is in progress
            copy_async(shared_address(shared), at<unsigned char>(p.x), 16);
            copy_commit();
            break;
        case 9:  // a masked copy from an address without memory (or, for `pad`, with)
            copy_async(shared_address(shared + 16 * thread), at<unsigned char>(p.pad ? p.x : 4096), 0);
            copy_commit();
            copy_wait<0>();
            break;
        default:
            break;
    }
}

// One box of 8 rows comes to the beginning of shared memory, whose first 1024 bytes it fills; a barrier follows it. `x` is
// the map, `pad` the box's row.
DEVICE void faulty_copy(const GatherParams& p, unsigned char* shared) {
    const SharedAddress to = shared_address(shared), barrier = to + 1024;
    const unsigned char* map = at<const unsigned char>(p.x);
    const uint32_t mistake = p.cols;
    if (threadIdx.x == 0) {
        if (mistake != 1) barrier_init(barrier, 1);
        if (mistake == 2) barrier_init(barrier, 1);
        if (mistake == 3) barrier_init(barrier + 12, 1);
        if (mistake == 4) *reinterpret_cast<uint32_t*>(shared + 1024) = 0;
        barrier_expect(barrier, mistake == 5 ? 512 : mistake == 6 ? 2048 : 1024);
        const int32_t row = static_cast<int32_t>(p.rows);
        copy_box(mistake == 7 ? to + 64 : mistake == 8 ? to + 128 : to, mistake == 9 ? map + 64 : map, 0, row, barrier);
        if (mistake != 10) barrier_arrive(barrier);
        if (mistake == 11) barrier_arrive(barrier);
    }
    sync_block();
    if (mistake != 12) barrier_wait(barrier, mistake == 13 ? 1 : 0);
    at<uint32_t>(p.out)[threadIdx.x] = reinterpret_cast<const uint32_t*>(shared)[threadIdx.x * 4];
}

KERNEL(faulty_boxes, 64, 1, GatherParams) {
    DYNAMIC_SHARED(shared);
    faulty_copy(p, shared);
}

// Products of 64 by 16 ones and 16 by 128 ones; `cols` says which mistake is made.
KERNEL(faulty_products, 128, 1, GatherParams) {
    DYNAMIC_SHARED(shared);
    const uint32_t mistake = p.cols, thread = threadIdx.x;
    uint32_t* words = reinterpret_cast<uint32_t*>(shared);
    for (uint32_t i = thread; i < (64 + 128) * 32; i += 128) words[i] = 0x3c003c00;
    if (mistake != 1) fence_shared_for_async();
    sync_block();
    float d[64];
    for (float& x : d) x = 1;
    const SharedAddress a = shared_address(shared), b = a + 64 * 128;
    if (mistake != 2) warpgroup_fence();
    wgmma_shared<f16, 128>(d, describe(mistake == 3 ? a + thread / 64 * 1024 : a, 16, 1024), describe(b, 16, 1024), true);
    if (mistake != 4) warpgroup_commit();
    if (mistake != 5) warpgroup_wait<0>();
    at<float>(p.out)[thread] = d[thread % 64];
    if (mistake == 5) warpgroup_wait<0>();
    if (mistake == 6) keep_registers<256>();
    if (mistake == 7 && thread < 64) keep_registers<64>();
    if (mistake == 8) {
        warpgroup_fence();
        wgmma_shared<f16, 128>(d, describe(a + 128 * 1024, 16, 1024), describe(b, 16, 1024), true);
        warpgroup_commit();
        warpgroup_wait<0>();
    }
}

// Copies 64 words of `x` to `out`, as a kernel that is launched before the one ahead of it has ended; `cols` says which mistake
// is made.
KERNEL_THAT_WAITS(faulty_waits, 64, 1, GatherParams) {
    const uint32_t* x = at<const uint32_t>(p.x);
    uint32_t* out = at<uint32_t>(p.out);
    const uint32_t thread = threadIdx.x;
    launch_dependents();
    switch (p.cols) {
        case 0:  // none
            wait_for_grids();
            out[thread] = x[thread];
            break;
        case 1:  // no wait
            out[thread] = x[thread];
            break;
        case 2:  // threads that do not wait
            if (thread < 32) wait_for_grids();
            out[thread] = x[thread];
            break;
        case 3: {  // what an earlier grid writes is read before the wait
            const uint32_t word = x[thread];
            wait_for_grids();
            out[thread] = word;
            break;
        }
        case 4:  // what an earlier grid reads is written before the wait
            at<uint32_t>(p.x)[thread] = 9;
            wait_for_grids();
            break;
        default:
            break;
    }
}
