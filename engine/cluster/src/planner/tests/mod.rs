//! The planner on pools drawn by hand, and properties of its plans on random ones.

mod plans;
mod scenes;
mod synthetic;
