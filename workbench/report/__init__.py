"""Reports: one document model, rendered to a self-contained page, a PDF, CSV files and LaTeX tables."""
