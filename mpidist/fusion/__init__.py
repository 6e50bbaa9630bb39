"""Making few large reductions of many small ones: the plan (pure), and the pipeline that packs and reduces by it."""
