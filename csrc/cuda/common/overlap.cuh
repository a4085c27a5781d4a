// Kernels that begin before the one in front of them in the stream has ended (see Spec.overlaps).
#pragma once

#include "types.cuh"

namespace te_dist::cuda {

// The next kernel may begin once every block of this one has called this or has ended.
TE_DIST_INLINE void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;"); }

// Until the kernel in front has ended and what it wrote can be read.
TE_DIST_INLINE void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace te_dist::cuda
