"""The loop as a class: `Trainer`, its evaluation, and what it carries from epoch to epoch."""
