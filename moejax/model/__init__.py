"""Pure layers of a decoder: attention, MLP, and MoE (route, dispatch, experts, combine)."""
