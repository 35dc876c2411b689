"""What tasks share whose rows are questions with one answer: encoding, samples, packing, the task itself."""
