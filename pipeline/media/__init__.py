"""Images to pixels in a supervised process."""
