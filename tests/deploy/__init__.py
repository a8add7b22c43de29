"""The chart, its renderings and the images, judged by Helm, kubectl, schemas, and real processes of rendered pods."""
