//! Random IDs of reservations.

use std::cell::RefCell;

use ring::rand::{SecureRandom as _, SystemRandom};

use super::token::ReservationId;

/// The number of IDs for which a thread requests random bytes at once. A system call for each
/// reservation would take longer than to seal its token.
const BATCH: usize = 32;

thread_local! {
    /// The IDs that this thread has not used yet.
    static UNUSED: RefCell<Vec<ReservationId>> = const { RefCell::new(Vec::new()) };
}

/// Returns a new random ID.
pub(crate) fn random_id() -> ReservationId {
    UNUSED.with_borrow_mut(|unused| {
        if unused.is_empty() {
            *unused = random_ids();
        }
        unused.pop().unwrap_or_else(unique_id)
    })
}

/// Returns random IDs; none if the operating system provides no random bytes.
fn random_ids() -> Vec<ReservationId> {
    let mut bytes = [0; BATCH * size_of::<ReservationId>()];
    match SystemRandom::new().fill(&mut bytes) {
        Ok(()) => bytes.as_chunks().0.to_vec(),
        Err(_) => Vec::new(),
    }
}

/// Returns an ID that is unique, but may be predictable. This is sufficient, because tokens are
/// sealed.
fn unique_id() -> ReservationId {
    let unique = u128::from_str_radix(&tidegate_redis::random_server_id(), 16);
    unique.unwrap_or_default().to_be_bytes()
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, thread};

    use super::*;

    #[test]
    fn ids_are_unique_across_batches_and_threads() {
        let ids = || (0..3 * BATCH).map(|_| random_id()).collect::<Vec<_>>();
        let other = thread::spawn(ids);
        let mut all = ids();
        all.extend(other.join().unwrap());
        all.extend([unique_id(), unique_id()]);
        let unique: HashSet<_> = all.iter().collect();
        assert_eq!(unique.len(), 6 * BATCH + 2);
    }
}
