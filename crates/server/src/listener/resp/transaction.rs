//! Transactions: the commands between `MULTI` and `EXEC`. Many clients send pipelines as
//! transactions by default.
//!
//! ```text
//! none --MULTI--> open --EXEC--> none     the commands are run, one reply for all of them
//!                  |  --DISCARD--> none
//!                  +--a command that cannot be queued--> failed --EXEC--> none     nothing is run
//! ```
//!
//! The commands are stored as bytes and parsed again later, because a parsed command borrows from
//! the read buffer. The extra work is acceptable, because transactions are rare.

use super::{bounds::MAX_COMMAND_BYTES, parse::Arguments};

/// An open transaction.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    /// The commands queued so far, in the wire format.
    queued: Vec<u8>,
    count: usize,
    spoilt: bool,
}

impl Transaction {
    /// Queues a command for `EXEC`. If the total length of the transaction's commands would exceed
    /// [`MAX_COMMAND_BYTES`], marks the transaction as failed and returns false.
    pub(super) fn queue(&mut self, arguments: Arguments<'_>) -> bool {
        let before = self.queued.len();
        let fits = arguments.write(&mut self.queued, MAX_COMMAND_BYTES);
        if fits {
            self.count += 1;
        } else {
            self.queued.truncate(before);
            self.spoil();
        }
        fits
    }

    /// Marks the transaction as failed. As in Redis, `EXEC` runs no command of a failed
    /// transaction.
    pub(super) fn spoil(&mut self) {
        self.spoilt = true;
        self.queued = Vec::new();
    }

    /// Returns the number of queued commands and their encoded bytes; `None` if the transaction has
    /// failed.
    pub(super) fn end(self) -> Option<(usize, Vec<u8>)> {
        (!self.spoilt).then_some((self.count, self.queued))
    }

    /// Returns an open transaction with `count` commands, from the result of [`Self::parts`].
    pub(super) fn from_parts(count: usize, queued: Vec<u8>, spoilt: bool) -> Self {
        Self {
            queued,
            count,
            spoilt,
        }
    }

    /// Returns the number of commands, their bytes, and whether the transaction has failed.
    pub(super) fn parts(&self) -> (usize, &[u8], bool) {
        (self.count, &self.queued, self.spoilt)
    }

    /// Returns the memory in use, in bytes.
    pub(super) fn heap_bytes(&self) -> usize {
        self.queued.capacity()
    }
}
