//! The commands between `MULTI` and `EXEC`, which many clients wrap around a pipeline without being asked.
//!
//! ```text
//! none --MULTI--> open --EXEC--> none     the commands are run, one answer for all of them
//!                  |  --DISCARD--> none
//!                  +--a command that cannot be run--> spoilt --EXEC--> none     nothing is run
//! ```
//!
//! Commands are kept as bytes and parsed again: a transaction is rarely used, and a parsed command borrows
//! from what was read.

use super::{bounds::MAX_COMMAND_BYTES, parse::Arguments};

/// A transaction that has begun.
#[derive(Debug, Default)]
pub(super) struct Transaction {
    /// The commands so far, one after the other as they would be on the wire.
    queued: Vec<u8>,
    count: usize,
    spoilt: bool,
}

impl Transaction {
    /// Keeps a command for `EXEC`. False, and the transaction is spoilt, if all of them together would be longer
    /// than one command may be.
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

    /// Makes `EXEC` run nothing, as Redis does after a command that it cannot queue.
    pub(super) fn spoil(&mut self) {
        self.spoilt = true;
        self.queued = Vec::new();
    }

    /// How many commands there are, and their bytes; `None` if the transaction is spoilt.
    pub(super) fn end(self) -> Option<(usize, Vec<u8>)> {
        (!self.spoilt).then_some((self.count, self.queued))
    }

    /// How much memory it holds.
    pub(super) fn held(&self) -> usize {
        self.queued.capacity()
    }
}
