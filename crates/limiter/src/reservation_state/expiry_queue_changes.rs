//! The changes that the expiry queue in Redis does not contain yet.

use std::collections::{BTreeSet, VecDeque};

use foldhash::{HashSet, HashSetExt as _};

use super::token::ReservationId;

/// The changes since the last write to the expiry queue. A reservation that ends before it is
/// written never reaches the expiry queue.
#[derive(Debug)]
pub(crate) struct ExpiryQueueChanges {
    /// The reservations that were made or changed since the last [`Self::age`].
    recent: BTreeSet<ReservationId>,
    /// The reservations that were made or changed before, which are written next.
    unwritten: BTreeSet<ReservationId>,
    /// The reservations that the expiry queue may contain. Clients cannot choose the IDs, so the
    /// set can use a fast hash function.
    queued: HashSet<ReservationId>,
    /// The reservations to remove from the expiry queue, oldest first. If Redis is unreachable for
    /// long, the oldest entries are dropped. Another server that claims these entries removes them,
    /// because their reservations have ended.
    ended: VecDeque<ReservationId>,
    max_ended: usize,
}

impl ExpiryQueueChanges {
    /// Creates the changes of a server that remembers at most `max_ended` reservations to remove
    /// from the expiry queue.
    pub(crate) fn new(max_ended: usize) -> Self {
        Self {
            recent: BTreeSet::new(),
            unwritten: BTreeSet::new(),
            queued: HashSet::new(),
            ended: VecDeque::new(),
            max_ended,
        }
    }

    /// Records a new or changed reservation.
    pub(crate) fn add(&mut self, id: ReservationId) {
        self.recent.insert(id);
    }

    /// Lets the recent reservations be written. Most reservations end before this call, so they are
    /// never written.
    pub(crate) fn age(&mut self) {
        self.unwritten.append(&mut self.recent);
    }

    /// Records that a reservation has ended.
    pub(crate) fn end(&mut self, id: &ReservationId) {
        self.forget_unwritten(id);
        if self.queued.remove(id) {
            self.ended.push_back(*id);
            self.drop_oldest_ended();
        }
    }

    fn forget_unwritten(&mut self, id: &ReservationId) {
        self.recent.remove(id);
        self.unwritten.remove(id);
    }

    fn drop_oldest_ended(&mut self) {
        let excess = self.ended.len().saturating_sub(self.max_ended);
        self.ended.drain(..excess);
    }

    /// Forgets a reservation without removing it from the expiry queue. Returns false if the expiry
    /// queue does not contain the reservation.
    pub(crate) fn forget_queued(&mut self, id: &ReservationId) -> bool {
        self.forget_unwritten(id);
        self.queued.remove(id)
    }

    /// Returns the next reservation to write. The caller must then write the reservation, unless it
    /// is no longer outstanding.
    pub(crate) fn next_unwritten(&mut self) -> Option<ReservationId> {
        self.unwritten.pop_first()
    }

    /// Records that the caller writes a reservation. The reservation counts as queued from the
    /// start of the call, because its result may remain unknown.
    pub(crate) fn begin_write(&mut self, id: ReservationId) {
        self.queued.insert(id);
    }

    /// Returns up to `most` reservations that the caller must remove from the expiry queue.
    pub(crate) fn take_ended(&mut self, most: usize) -> Vec<ReservationId> {
        let kept = self.ended.len().saturating_sub(most);
        self.ended.split_off(kept).into()
    }

    /// Records that the call with these changes has failed.
    pub(crate) fn restore(
        &mut self,
        ended: Vec<ReservationId>,
        written: impl IntoIterator<Item = ReservationId>,
    ) {
        self.ended.extend(ended);
        self.drop_oldest_ended();
        // If a reservation has ended during the call, it must not be written again.
        let outstanding = written.into_iter().filter(|id| self.queued.contains(id));
        self.unwritten.extend(outstanding);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Add(u8),
        End(u8),
        /// Writes a batch of at most `most` changes of each kind to Redis. While the call is in
        /// progress, the reservation `ended_meanwhile` ends. `result` is the result of the call.
        Write {
            most: usize,
            ended_meanwhile: u8,
            result: CallResult,
        },
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum CallResult {
        Executed,
        ReplyLost,
        NotExecuted,
    }

    fn step() -> impl Strategy<Value = Step> {
        let results = [
            CallResult::Executed,
            CallResult::ReplyLost,
            CallResult::NotExecuted,
        ];
        let result = prop::sample::select(results.to_vec());
        prop_oneof![
            3 => (0..30_u8).prop_map(Step::Add),
            2 => (0..30_u8).prop_map(Step::End),
            2 => (1..5_usize, 0..40_u8, result).prop_map(|(most, ended_meanwhile, result)| {
                Step::Write { most, ended_meanwhile, result }
            }),
        ]
    }

    struct Pair {
        changes: ExpiryQueueChanges,
        outstanding: BTreeSet<ReservationId>,
        /// The reservations that have ended. An ID is never used again.
        over: BTreeSet<ReservationId>,
        expiry_queue: BTreeSet<ReservationId>,
    }

    impl Default for Pair {
        fn default() -> Self {
            Self {
                changes: ExpiryQueueChanges::new(usize::MAX),
                outstanding: BTreeSet::new(),
                over: BTreeSet::new(),
                expiry_queue: BTreeSet::new(),
            }
        }
    }

    impl Pair {
        fn add(&mut self, id: ReservationId) {
            if !self.over.contains(&id) {
                self.outstanding.insert(id);
                self.changes.add(id);
            }
        }

        fn end(&mut self, id: ReservationId) {
            self.over.insert(id);
            if self.outstanding.remove(&id) {
                self.changes.end(&id);
            }
        }

        /// Returns whether there was anything to write.
        fn write(&mut self, most: usize, ended_meanwhile: u8, result: CallResult) -> bool {
            let ended = self.changes.take_ended(most);
            self.changes.age();
            let mut written = Vec::new();
            while written.len() < most
                && let Some(id) = self.changes.next_unwritten()
            {
                assert!(self.outstanding.contains(&id));
                self.changes.begin_write(id);
                written.push(id);
            }
            self.end([ended_meanwhile; 16]);
            if result != CallResult::NotExecuted {
                for id in &ended {
                    self.expiry_queue.remove(id);
                }
                self.expiry_queue.extend(&written);
            }
            let had_changes = !ended.is_empty() || !written.is_empty();
            if result != CallResult::Executed {
                self.changes.restore(ended, written);
            }
            had_changes
        }
    }

    #[test]
    fn the_reservations_to_remove_are_bounded() {
        let mut changes = ExpiryQueueChanges::new(2);
        let ids: [ReservationId; 4] = [0, 1, 2, 3].map(|number| [number; 16]);
        let end = |changes: &mut ExpiryQueueChanges, id| {
            changes.begin_write(id);
            changes.end(&id);
        };
        for id in &ids[..3] {
            end(&mut changes, *id);
        }
        let taken = changes.take_ended(4);
        assert_eq!(taken, &ids[1..3]);
        end(&mut changes, ids[3]);
        changes.restore(taken, []);
        assert_eq!(changes.take_ended(4).len(), 2);
    }

    proptest! {
        /// Whatever calls fail, the expiry queue contains exactly the outstanding reservations
        /// after the last change was written.
        #[test]
        fn the_expiry_queue_converges(steps in prop::collection::vec(step(), 1..60)) {
            let mut pair = Pair::default();
            for step in steps {
                match step {
                    Step::Add(number) => pair.add([number; 16]),
                    Step::End(number) => pair.end([number; 16]),
                    Step::Write { most, ended_meanwhile, result } => {
                        pair.write(most, ended_meanwhile, result);
                    }
                }
                prop_assert!(pair.changes.ended.len() <= pair.over.len());
            }
            while pair.write(3, u8::MAX, CallResult::Executed) {}
            prop_assert_eq!(&pair.expiry_queue, &pair.outstanding);
        }

        #[test]
        fn a_reservation_that_ends_early_is_never_written(number in any::<u8>()) {
            let mut changes = ExpiryQueueChanges::new(usize::MAX);
            for ages in 0..2 {
                changes.add([number; 16]);
                (0..ages).for_each(|_| changes.age());
                changes.end(&[number; 16]);
                changes.age();
                prop_assert_eq!(changes.next_unwritten(), None);
                prop_assert!(changes.take_ended(1).is_empty());
            }
        }

        #[test]
        fn a_reservation_is_written_only_after_it_was_outstanding_for_a_while(
            number in any::<u8>(),
        ) {
            let mut changes = ExpiryQueueChanges::new(usize::MAX);
            changes.add([number; 16]);
            prop_assert_eq!(changes.next_unwritten(), None);
            changes.age();
            prop_assert_eq!(changes.next_unwritten(), Some([number; 16]));
        }
    }
}
