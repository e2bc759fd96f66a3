"""What is measured on a GPU, by what the ops read.

Where an op needs what another computes, as an index of turns, the reference computes that and is not measured.
"""

from bench.gpu_cases import gradients, hidden, log_probs, logits
from bench.gpu_cases.case import Case, Peer, Work, copy_of, relative_error

CASES = (*log_probs.CASES, *logits.CASES, *hidden.CASES, *gradients.CASES)

__all__ = ["CASES", "Case", "Peer", "Work", "copy_of", "relative_error"]
