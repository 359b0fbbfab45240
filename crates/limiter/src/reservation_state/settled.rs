//! The most recently settled reservations of counters. A repeated settlement of one of them is
//! recognized.

use std::collections::VecDeque;

use foldhash::{HashMap, HashMapExt as _};
use tidegate_core::{
    Timestamp,
    bounds::{MAX_CHARGES, MAX_KEY_BYTES},
};

use super::{reservation_reader::ReservationReader, token::ReservationId};

/// The keys of the counters of a reservation.
pub(crate) type CounterKeys = Box<[Box<[u8]>]>;

/// The most recently settled reservations of counters, in the order in which they were settled.
/// Each ID has its counters, and the instant at which the reservation would have expired.
#[derive(Debug)]
pub(crate) struct SettledIds {
    max: usize,
    by_settlement: VecDeque<(Timestamp, ReservationId)>,
    counters: HashMap<ReservationId, CounterKeys>,
}

impl SettledIds {
    /// Creates an empty list, which stores at most `max` settled reservations.
    pub(crate) fn new(max: usize) -> Self {
        Self {
            max,
            by_settlement: VecDeque::new(),
            counters: HashMap::new(),
        }
    }

    /// Stores at `now` that a reservation of these counters, which would have expired at `expires`,
    /// was settled.
    pub(crate) fn record(
        &mut self,
        id: ReservationId,
        expires: Timestamp,
        counters: CounterKeys,
        now: Timestamp,
    ) {
        // Another process may send a reservation twice.
        if self.counters.contains_key(&id) {
            return;
        }
        while let Some((end, oldest)) = self.by_settlement.front() {
            if *end > now && self.by_settlement.len() < self.max {
                break;
            }
            self.counters.remove(oldest);
            self.by_settlement.pop_front();
        }
        self.by_settlement.push_back((expires, id));
        self.counters.insert(id, counters);
    }

    /// Returns the counters of a settled reservation, if it is still stored.
    pub(crate) fn counters(&self, id: &ReservationId) -> Option<&CounterKeys> {
        self.counters.get(id)
    }

    /// Encodes each settled reservation for another process, in the order of the settlements:
    ///
    /// ```text
    ///   | id: 16 | expires: 8 | key length: 2 | key | …
    /// ```
    pub(crate) fn encode(&self) -> Vec<Vec<u8>> {
        let encode = |(expires, id): &(Timestamp, ReservationId)| {
            let mut bytes = id.to_vec();
            bytes.extend_from_slice(&expires.as_micros().to_be_bytes());
            for key in self.counters.get(id)? {
                bytes.extend_from_slice(&u16::try_from(key.len()).ok()?.to_be_bytes());
                bytes.extend_from_slice(key);
            }
            Some(bytes)
        };
        self.by_settlement.iter().filter_map(encode).collect()
    }

    /// Stores an encoded settled reservation. Returns false if the encoding is not valid.
    pub(crate) fn take(&mut self, encoded: &[u8], now: Timestamp) -> bool {
        let Some((id, expires, counters)) = decode(encoded) else {
            return false;
        };
        if expires > now {
            self.record(id, expires, counters, now);
        }
        true
    }
}

fn decode(encoded: &[u8]) -> Option<(ReservationId, Timestamp, CounterKeys)> {
    let mut input = ReservationReader(encoded);
    let id = input.take(size_of::<ReservationId>())?.try_into().ok()?;
    let expires = Timestamp::from_micros(input.number()?);
    let mut counters = Vec::new();
    while !input.is_empty() {
        let key = input.take_with_length()?;
        if key.len() > MAX_KEY_BYTES || counters.len() == MAX_CHARGES {
            return None;
        }
        counters.push(Box::from(key));
    }
    Some((id, expires, counters.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_micros(0);
    const LATER: Timestamp = Timestamp::from_micros(1);

    fn keys(keys: &[&str]) -> CounterKeys {
        keys.iter().map(|key| Box::from(key.as_bytes())).collect()
    }

    #[test]
    fn settled_reservations_move_up_to_the_maximum() {
        let mut old = SettledIds::new(3);
        for number in 0..4 {
            old.record([number; 16], LATER, keys(&["a", ""]), NOW);
        }
        let mut new = SettledIds::new(2);
        // A record that is taken twice has no effect.
        for encoded in old.encode().iter().flat_map(|encoded| [encoded, encoded]) {
            assert!(new.take(encoded, NOW));
        }
        let is_kept = |number| new.counters(&[number; 16]) == Some(&keys(&["a", ""]));
        assert_eq!([0, 1, 2, 3].map(is_kept), [false, false, true, true]);
        assert_eq!(new.encode().len(), 2);

        let mut late = SettledIds::new(2);
        assert!(late.take(&old.encode()[0], LATER));
        assert!(late.encode().is_empty());
    }

    #[test]
    fn an_invalid_encoding_is_refused() {
        let mut old = SettledIds::new(1);
        old.record([1; 16], LATER, keys(&["key"]), NOW);
        let encoded = old.encode().remove(0);
        let mut new = SettledIds::new(1);
        // An encoding without keys is complete.
        for length in (0..encoded.len()).filter(|length| *length != 24) {
            assert!(!new.take(&encoded[..length], NOW), "{length} bytes");
        }
        let long = [&encoded[..24], &[0; 2 * (MAX_CHARGES + 1)]].concat();
        assert!(!new.take(&long, NOW));
    }
}
