"""Round plans: who trains in which mode, so that every supply's watts hold and the slowest is done soonest."""
