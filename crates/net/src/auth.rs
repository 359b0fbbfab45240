//! Client authentication with a shared secret (a token or a password), and a rate limit on invalid
//! secrets.
//!
//! An invalid secret is counted, logged and charged to the client's IPv4 address or IPv6 /64. After
//! too many invalid secrets, further attempts from that address are rejected without comparing the
//! secret. A comparison would let the client learn whether a guess is correct. As a consequence,
//! all clients behind one address share the number of attempts.

use std::{
    net::{IpAddr, Ipv6Addr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use sha2::{Digest, Sha256};
use tidegate::Clock;
use tidegate_core::{
    Algorithm, Charge, Cost, Decision, Effect, Limit, Limits, MemoryBounds, MemoryStore, Outcome,
    Rate, Span, Timestamp,
};

use crate::{
    prometheus::{Metric, Page},
    registry::network,
};

/// The number of invalid secrets that an address may send at once.
const BURST: u64 = 10;
/// The rate at which an address may send further invalid secrets.
const RATE: Rate = Rate {
    count: 1,
    period: Span::from_secs(1),
};

/// The maximum number of addresses whose invalid secrets are counted. If all of these addresses are
/// locked out, secrets from a new address are compared but not counted. If secrets from new
/// addresses were rejected, an attacker with many addresses could lock out every client.
const MAX_ADDRESSES: usize = 10_000;

const FAILURES: Metric<2> = Metric::counter(
    "tidegate_authentication_failures_total",
    ["listener", "reason"],
    "Failed authentication attempts: an invalid secret, or too many invalid secrets from one address.",
);

/// Checks the secrets that the clients of one listener send.
pub struct Authenticator {
    listener: &'static str,
    /// The SHA-256 digests of the accepted secrets. An empty list disables authentication.
    secrets: Vec<[u8; 32]>,
    clock: Clock,
    limits: Option<Limits>,
    guesses: MemoryStore,
    wrong: AtomicU64,
    limited: AtomicU64,
}

/// Omits the secrets and all values derived from them, so that they never reach a log.
impl std::fmt::Debug for Authenticator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authenticator")
            .field("listener", &self.listener)
            .finish_non_exhaustive()
    }
}

/// The result of an authentication attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuthOutcome {
    /// The secret is valid, or no secret is needed.
    Accepted {
        /// The index of the secret among the authenticator's secrets; 0 if no secret is needed.
        secret: usize,
    },
    /// The secret is invalid.
    Wrong,
    /// The address has sent too many invalid secrets, so the server did not compare this secret.
    Limited {
        /// The time after which the address may try again.
        retry_after: Span,
    },
}

impl Authenticator {
    /// Creates an authenticator that accepts any of `secrets`. Without secrets, the authenticator
    /// accepts every client. Empty secrets are ignored. `listener` is the name of the listener in
    /// logs and metrics.
    #[must_use]
    pub fn new<'s>(
        listener: &'static str,
        secrets: impl IntoIterator<Item = &'s [u8]>,
        clock: Clock,
    ) -> Self {
        let secrets = secrets.into_iter();
        let bounds = MemoryBounds {
            max_keys: MAX_ADDRESSES,
            ..MemoryBounds::default()
        };
        let limit = Limit::new(Algorithm::Gcra {
            rate: RATE,
            burst: BURST - 1,
        });
        Self {
            listener,
            secrets: secrets
                .filter(|secret| !secret.is_empty())
                .map(|secret| Sha256::digest(secret).into())
                .collect(),
            clock,
            // The constants are within all bounds, so the limit is always valid. A test checks that
            // the limit is valid.
            limits: limit.and_then(|limit| Limits::new(vec![limit])).ok(),
            guesses: MemoryStore::new(bounds),
            wrong: AtomicU64::new(0),
            limited: AtomicU64::new(0),
        }
    }

    /// Returns whether authentication is disabled.
    #[must_use]
    pub const fn is_open(&self) -> bool {
        self.secrets.is_empty()
    }

    /// Checks the `secret` that `peer` sent.
    pub fn check(&self, peer: IpAddr, secret: &[u8]) -> AuthOutcome {
        if self.is_open() {
            return AuthOutcome::Accepted { secret: 0 };
        }
        let (peer, now) = (key(peer), self.clock.now());
        // The limit is checked before the comparison, so that a rejected client does not learn
        // whether its guess is correct.
        if let Some(retry_after) = self.wait(&peer, now, Effect::Peek) {
            self.limited.fetch_add(1, Ordering::Relaxed);
            return AuthOutcome::Limited { retry_after };
        }
        // The digests have equal length and are compared in constant time, so the comparison
        // reveals nothing about the secrets.
        let shown: [u8; 32] = Sha256::digest(secret).into();
        // Every secret is compared, so that the time does not depend on which secret matches.
        let mut accepted = None;
        for (secret, expected) in self.secrets.iter().enumerate() {
            if equal_in_constant_time(&shown, expected) {
                accepted = Some(secret);
            }
        }
        if let Some(secret) = accepted {
            return AuthOutcome::Accepted { secret };
        }
        self.wait(&peer, now, Effect::Charge);
        self.wrong.fetch_add(1, Ordering::Relaxed);
        let peer = IpAddr::V6(Ipv6Addr::from(peer)).to_canonical();
        tracing::warn!(listener = self.listener, %peer, "authentication failed: invalid secret");
        AuthOutcome::Wrong
    }

    /// Returns the time that `peer` must wait before its next attempt, or `None` if it may try now.
    fn wait(&self, peer: &[u8], now: Timestamp, effect: Effect) -> Option<Span> {
        let charge = Charge::new(peer, self.limits.as_ref()?, Cost::ONE).ok()?;
        let mut outcomes: Vec<Outcome> = Vec::new();
        let decision = self.guesses.check(&[charge], now, effect, &mut outcomes);
        match decision {
            // If the store is full, attempts from this address cannot be counted, so the attempt is
            // not limited.
            Decision::Admitted | Decision::Full { .. } => None,
            _ => {
                let retry = outcomes
                    .first()
                    .and_then(|outcome| outcome.retry_after.span());
                Some(retry.unwrap_or(RATE.period).max(Span::from_micros(1)))
            }
        }
    }

    /// Adds the metrics of `authenticators` to `page`.
    pub fn collect(authenticators: &[Arc<Self>], page: &mut Page<'_>) {
        let failures = authenticators.iter().flat_map(|authenticator| {
            let counts = [
                ("wrong", &authenticator.wrong),
                ("limited", &authenticator.limited),
            ];
            counts.map(|(reason, count)| {
                let labels = [authenticator.listener, reason];
                (labels, count.load(Ordering::Relaxed))
            })
        });
        page.family(&FAILURES, failures);
    }
}

/// Combines a user name and a password into one secret, so that the two cannot be guessed
/// separately.
#[must_use]
pub fn login(user: &[u8], password: &[u8]) -> Vec<u8> {
    [user, b"\0", password].concat()
}

/// Returns the key under which guesses from `peer` are counted.
fn key(peer: IpAddr) -> [u8; 16] {
    match network(peer) {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

fn equal_in_constant_time(a: &[u8; 32], b: &[u8; 32]) -> bool {
    let difference = a
        .iter()
        .zip(b)
        .fold(0, |difference, (a, b)| difference | (a ^ b));
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCEPTED: AuthOutcome = AuthOutcome::Accepted { secret: 0 };
    const PEER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn at_secs(secs: u64) -> Timestamp {
        Timestamp::from_micros(1_700_000_000_000_000 + secs * 1_000_000)
    }

    #[test]
    fn a_secret_matches_if_every_byte_matches() {
        let clock = Clock::manual(at_secs(0));
        let guarded = Authenticator::new("http", [&b"secret"[..]], clock.clone());
        assert!(guarded.limits.is_some());
        assert_eq!(guarded.check(PEER, b"secret"), ACCEPTED);
        for other in [&b"secreT"[..], b"Secret", b"secre", b"secrets", b""] {
            assert_eq!(guarded.check(PEER, other), AuthOutcome::Wrong);
        }
        for open in [None, Some(&b""[..])] {
            let open = Authenticator::new("http", open, clock.clone());
            assert!(open.is_open());
            assert_eq!(open.check(PEER, b"whatever"), ACCEPTED);
        }
    }

    #[test]
    fn each_of_several_secrets_is_accepted_and_recognised() {
        let clock = Clock::manual(at_secs(0));
        let guarded = Authenticator::new("admin", [&b"one"[..], b"two", b"three"], clock);
        for (secret, text) in [&b"one"[..], b"two", b"three"].into_iter().enumerate() {
            assert_eq!(guarded.check(PEER, text), AuthOutcome::Accepted { secret });
        }
        assert_eq!(guarded.check(PEER, b"four"), AuthOutcome::Wrong);
    }

    #[test]
    fn an_address_with_wrong_guesses_is_locked_out() {
        let clock = Clock::manual(at_secs(0));
        let guarded = Authenticator::new("http", [&b"secret"[..]], clock.clone());
        let wrong = (0..1_000)
            .filter(|_| guarded.check(PEER, b"guess") == AuthOutcome::Wrong)
            .count();
        assert_eq!(wrong, 10);
        let AuthOutcome::Limited { retry_after } = guarded.check(PEER, b"secret") else {
            panic!("the right secret must not be accepted among many guesses");
        };
        assert_eq!(retry_after, Span::from_secs(1));
        let other = "192.0.2.2".parse().unwrap();
        assert_eq!(guarded.check(other, b"secret"), ACCEPTED);
        clock.set(at_secs(1));
        assert_eq!(guarded.check(PEER, b"secret"), ACCEPTED);
        assert_eq!(guarded.check(PEER, b"guess"), AuthOutcome::Wrong);
        assert!(matches!(
            guarded.check(PEER, b"guess"),
            AuthOutcome::Limited { .. }
        ));
        let counted = (
            guarded.wrong.load(Ordering::Relaxed),
            guarded.limited.load(Ordering::Relaxed),
        );
        assert_eq!(counted, (11, 992));
    }

    /// Regression test: a full table rejected every new address, even with a valid secret.
    #[test]
    fn a_full_table_locks_out_no_new_address() {
        let mut guarded = Authenticator::new("http", [&b"secret"[..]], Clock::manual(at_secs(0)));
        guarded.guesses = MemoryStore::new(MemoryBounds {
            max_keys: 16,
            ..MemoryBounds::default()
        });
        let peer = |number: u8| IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, number));
        for number in 0..100 {
            for _ in 0..11 {
                guarded.check(peer(number), b"guess");
            }
        }
        for number in 100..200 {
            assert_eq!(guarded.check(peer(number), b"guess"), AuthOutcome::Wrong);
            assert_eq!(guarded.check(peer(number), b"secret"), ACCEPTED);
        }
        assert!(matches!(
            guarded.check(peer(0), b"secret"),
            AuthOutcome::Limited { .. }
        ));
    }

    #[test]
    fn debug_output_has_no_secret() {
        let guarded = Authenticator::new("http", [&b"secret"[..]], Clock::manual(at_secs(0)));
        assert!(!format!("{guarded:?}").contains("secret:"));
    }
}
