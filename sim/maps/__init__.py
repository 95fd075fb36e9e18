"""Maps over all methods: which is fastest by running sequences and context, at what GPU-time per token, and how sure that is."""
