// Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020), by recursive vector halving.
#pragma once

#include <cstddef>

#include "calls/direct.h"

namespace elastic {

// Replaces `data` on all ranks by the adaptive sum of their vectors; identical bits on every rank. Two vectors combine
// to a(1 - a·b / 2|a|²) + b(1 - a·b / 2|b|²): their sum where they are orthogonal, their mean where they are parallel.
// With p the largest power of two up to the number of ranks, r + p combines with r first, then neighbours at 1, 2, 4...
void adasum(const Route& route, float* data, size_t count);
void adasum(const Route& route, double* data, size_t count);

}  // namespace elastic
