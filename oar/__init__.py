"""Outcome-Grounded Advantage Reshaping (arXiv 2601.07408): token-level credit assignment for GRPO, one concept per file."""
