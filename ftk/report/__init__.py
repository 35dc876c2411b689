"""What a run tells about itself: its environment, and its figures as one page."""
