"""Reading and preprocessing text: files, records, documents, worker processes."""
