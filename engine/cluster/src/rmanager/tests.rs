//! Tests of the rManager.
