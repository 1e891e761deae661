// Kernels with one mistake each, which the shim must show. They are in no fatbin.
#include "../kernels/shared/common.cuh"

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
            copy_async(shared_address(shared + 16 * thread), at<unsigned char>(p.x) + 16 * thread, true);
            copy_commit();
            out[thread] = words[4 * thread];
            copy_wait<0>();
            break;
        case 6:  // the last byte of shared memory and one more
            out[thread] = shared[p.pad];
            break;
        case 7:  // a copy to an address that is not aligned
            copy_async(shared_address(shared + 4 * thread), at<unsigned char>(p.x), true);
            break;
        case 8:  // a thread that ends while its copy is under way
            copy_async(shared_address(shared), at<unsigned char>(p.x), true);
            copy_commit();
            break;
        default:
            break;
    }
}
