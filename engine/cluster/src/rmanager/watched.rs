//! A half of an rManager with a mark for possible timer changes: every mutable access sets it, so that no caller can
//! forget.

use std::ops::{Deref, DerefMut};

/// A value that marks mutable accesses.
#[derive(Debug)]
pub struct Watched<T> {
    inner: T,
    touched: bool,
}

impl<T> Watched<T> {
    pub(super) fn new(inner: T) -> Self {
        Self { inner, touched: true }
    }

    /// Mutable access without a mark, for calls that change no timer.
    pub(super) fn unnoted(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Whether it was accessed mutably since [`Watched::forget`].
    pub(super) fn touched(&self) -> bool {
        self.touched
    }

    pub(super) fn forget(&mut self) {
        self.touched = false;
    }
}

impl<T> Deref for Watched<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for Watched<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.touched = true;
        &mut self.inner
    }
}
