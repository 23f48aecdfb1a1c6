"""Quality of blended answers: data sets and synthetic worlds, sweeps over them, comparisons, and `check-model`."""
