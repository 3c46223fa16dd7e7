"""The composition root: commands, the run's config, and the only place that knows which part stands behind which port."""
