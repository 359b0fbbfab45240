//! Whoever says nothing is not waited for forever.

use std::{
    task::{Context, Poll},
    time::Duration,
};

use crate::net::LazyTimer;

/// How long the next octets may be waited for. Time in which nobody waits does not count, so that a slow reader at
/// the other end of a body is not blamed on its writer.
#[derive(Debug)]
pub(super) struct Silence {
    longest: Duration,
    /// There once something has been waited for.
    timer: Option<Box<LazyTimer>>,
    is_awaited: bool,
}

impl Silence {
    pub(super) const fn new(longest: Duration) -> Self {
        Self {
            longest,
            timer: None,
            is_awaited: false,
        }
    }

    /// Something has come.
    pub(super) fn broken(&mut self) {
        self.is_awaited = false;
    }

    /// Nothing has come: ready once that has lasted too long.
    pub(super) fn poll_too_long(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let longest = self.longest;
        let timer = self
            .timer
            .get_or_insert_with(|| LazyTimer::new(longest).into());
        if !self.is_awaited {
            self.is_awaited = true;
            timer.set(longest);
        }
        timer.poll_due(cx)
    }
}
