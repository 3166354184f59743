"""Training and evaluation, whatever the task: loop, step, hooks, what a run resumes by, processes."""
