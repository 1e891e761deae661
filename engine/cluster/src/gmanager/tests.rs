//! Tests of the gManager.
