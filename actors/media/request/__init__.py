"""What is asked of the intake: sources, limits, policy, tasks of its processes, and the reasons of rejections."""
