// The first ranks of all hosts as a world of their own for Gloo's algorithms, over the mesh that all ranks have.
#pragma once

#include <memory>
#include <vector>

#include "calls/gloo_calls.h"
#include "transport/mesh.h"

namespace elastic {

// ranks: of the leaders, in their order; this rank is one of them.
World worldOf(const std::shared_ptr<Mesh>& mesh, const std::vector<int>& ranks);

}  // namespace elastic
