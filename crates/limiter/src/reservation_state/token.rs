//! Reservation tokens. A token is authenticated with HMAC-SHA256, so a client cannot forge a token.
//! The token is not encrypted, so a client can read the keys of its charges.
//!
//! ```text
//!   | version: 1 | kind: 1 | id: 16 | expires: 8 | cost: 8 | holder: 1 | charge | … | tag: 32 |
//!
//!                                                                                in base64url
//!   charge: | key length: 2 | key | cost: 8 | flags: 1 | plan | limits
//!           | receipt length: 2 | receipt |
//! ```
//!
//! A token contains the charges only if they were made in Redis, so that every server that shares
//! the Redis can settle them. If the charges are not in Redis, the server that made the reservation
//! keeps them. The byte `holder` is 0 if nothing was charged, 1 if the server holds the charges,
//! and 2 if they are in Redis.
//!
//! The byte `kind` is 1 for a request, whose charges belong to rules, and 2 for counters. A call
//! accepts only tokens of its own kind, because the two kinds of reservations are settled in
//! different ways.
//!
//! The expiry queue, a snapshot and another process receive a reservation in the same format,
//! without the tag.
//!
//! Each charge contains the limits under which it was made. Other limits may apply to its key when
//! the reservation ends, because of an override or a reload, but only these limits describe the
//! state in which the charge is counted.

use std::sync::{Arc, OnceLock};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use ring::{
    hmac,
    rand::{SecureRandom as _, SystemRandom},
};
use smallvec::SmallVec;
use tidegate::rate_limiter::{OwnedCharge, OwnedCharges, StoredCharge};
use tidegate_core::{
    Cost, Limits, Timestamp,
    bounds::{MAX_CHARGES, MAX_KEY_BYTES},
};

use super::{reservation_reader::ReservationReader, stored_limits};

/// The version of the token format. Tokens of version 1, which had no kind, are no longer valid.
const VERSION: u8 = 2;

/// The flag of a charge whose limits were raised (elastic rule).
const IS_STRETCHED: u8 = 1;
/// The flag of a charge whose limits came from a plan.
const HAS_PLAN: u8 = 2;
/// The flag of a charge that is stored with its limits.
const HAS_LIMITS: u8 = 4;

/// The byte `holder` of a token without charges.
const NOTHING: u8 = 0;
/// The byte `holder` of a token whose charges the server holds.
const ON_SERVER: u8 = 1;
/// The byte `holder` of a token whose charges are in Redis.
const IN_REDIS: u8 = 2;

/// The length of the HMAC at the end of a token, in bytes.
const TAG_BYTES: usize = 32;

/// The initial buffer size for a token, in bytes. Most tokens fit into this buffer without
/// reallocation.
const USUAL_BYTES: usize = 256;

/// A random number that identifies a reservation.
pub(crate) type ReservationId = [u8; 16];

/// The kind of a reservation, which determines the calls that accept its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ReservationKind {
    /// A reservation for a request that rules charge.
    Request = 1,
    /// A reservation of counters, whose limits the caller specifies.
    Counters = 2,
}

impl ReservationKind {
    /// Returns the kind of a reservation of `charges`.
    pub(crate) fn of(charges: &OwnedCharges) -> Self {
        if charges.has_rules() {
            Self::Request
        } else {
            Self::Counters
        }
    }
}

/// The holder of the charges of a new reservation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ChargesHolder<'r> {
    /// Nothing was charged.
    None,
    /// The server that made the reservation.
    Server,
    /// Redis, which issued a receipt for each charge.
    Redis(&'r [Vec<u8>]),
}

/// The contents of a token, without the charges.
#[derive(Debug)]
pub(crate) struct TokenHead {
    pub(crate) kind: ReservationKind,
    pub(crate) id: ReservationId,
    /// The instant at which the reservation expires, unless it has since been renewed.
    pub(crate) expires: Timestamp,
    /// The cost of the request.
    pub(crate) cost: Cost,
}

/// The contents of a token.
#[derive(Debug)]
pub(crate) struct TokenContents {
    pub(crate) head: TokenHead,
    pub(crate) charges: TokenCharges,
}

/// Where the charges of a reservation are stored.
#[derive(Debug)]
pub(crate) enum TokenCharges {
    /// Nothing was charged.
    None,
    /// The server that made the reservation holds the charges.
    OnServer,
    /// The charges are in Redis, each with its receipt.
    InRedis(Vec<SharedCharge>),
}

/// A charge in Redis, with its receipt.
#[derive(Clone, Debug)]
pub(crate) struct SharedCharge {
    pub(crate) charge: StoredCharge,
    /// The limits under which the charge was made; `None` if an earlier version has written the
    /// charge.
    pub(crate) limits: Option<Arc<Limits>>,
    pub(crate) receipt: Vec<u8>,
}

impl SharedCharge {
    /// Returns `charges` with their receipts, in the form in which another server can end them.
    pub(crate) fn list(charges: &OwnedCharges, receipts: &[Vec<u8>]) -> Vec<Self> {
        let with_limits = charges.to_stored().into_iter().zip(charges.list());
        let shared = with_limits.zip(receipts);
        let shared = shared.map(|((stored, charge), receipt)| Self {
            charge: stored,
            limits: Some(Arc::clone(charge.limits())),
            receipt: receipt.clone(),
        });
        shared.collect()
    }
}

/// The error if the operating system provides no random bytes for a key.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "cannot create a key for reservation tokens, because the operating system provides no \
     random bytes; set `reservations.secret_env`"
)]
pub struct NoTokenKey;

/// The keys that seal tokens. The first key seals new tokens. Tokens sealed with any of the keys
/// are valid. Without a key, no token is valid.
#[derive(Default)]
pub(crate) struct TokenKeys {
    secrets: Vec<hmac::Key>,
    /// A random key, if there are no secrets.
    random: Option<RandomKey>,
}

/// The length of a random key, in bytes.
const KEY_BYTES: usize = 32;

/// A random key, which another process can replace.
struct RandomKey {
    own: SecretKey,
    taken: OnceLock<SecretKey>,
}

struct SecretKey {
    bytes: [u8; KEY_BYTES],
    key: hmac::Key,
}

impl SecretKey {
    fn new(bytes: [u8; KEY_BYTES]) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &bytes);
        Self { bytes, key }
    }
}

impl RandomKey {
    fn current(&self) -> &SecretKey {
        self.taken.get().unwrap_or(&self.own)
    }
}

/// Hides the keys, because `Debug` output can reach logs.
impl std::fmt::Debug for TokenKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TokenKeys(…)")
    }
}

impl TokenKeys {
    /// Creates the keys from secrets separated by spaces.
    pub(crate) fn new(secrets: &str) -> Self {
        let keys = secrets.split_whitespace();
        let key = |secret: &str| hmac::Key::new(hmac::HMAC_SHA256, secret.as_bytes());
        Self {
            secrets: keys.map(key).collect(),
            random: None,
        }
    }

    /// Creates a random key.
    pub(crate) fn random() -> Result<Self, NoTokenKey> {
        let mut bytes = [0; KEY_BYTES];
        let filled = SystemRandom::new().fill(&mut bytes);
        filled.map_err(|_| NoTokenKey)?;
        let random = RandomKey {
            own: SecretKey::new(bytes),
            taken: OnceLock::new(),
        };
        Ok(Self {
            secrets: Vec::new(),
            random: Some(random),
        })
    }

    /// Returns the random key, if there are no secrets.
    pub(crate) fn own(&self) -> Option<&[u8]> {
        let random = self.random.as_ref()?;
        Some(&random.current().bytes)
    }

    /// Replaces the random key, if there are no secrets. Returns false if `key` is not valid.
    pub(crate) fn take(&self, key: &[u8]) -> bool {
        let Ok(bytes) = key.try_into() else {
            return false;
        };
        if let Some(random) = &self.random {
            // A process takes over from at most one other process, so the key is replaced only
            // once.
            let _ = random.taken.set(SecretKey::new(bytes));
        }
        true
    }

    /// Returns the valid keys. The first key seals new tokens.
    fn all(&self) -> impl Iterator<Item = &hmac::Key> {
        let random = self.random.as_ref();
        let random = random.map(|random| &random.current().key);
        self.secrets.iter().chain(random)
    }

    /// Seals `contents` into a token.
    pub(crate) fn seal(&self, contents: &TokenContents) -> String {
        self.seal_bytes(contents.encode())
    }

    /// Seals the token of a new reservation of `charges`, which `holder` holds.
    pub(crate) fn seal_new(
        &self,
        head: &TokenHead,
        charges: &OwnedCharges,
        holder: ChargesHolder<'_>,
    ) -> String {
        self.seal_bytes(match holder {
            ChargesHolder::None => head.encode(NOTHING),
            ChargesHolder::Server => head.encode(ON_SERVER),
            ChargesHolder::Redis(receipts) => head.encode_with(charges, receipts),
        })
    }

    fn seal_bytes(&self, mut bytes: Vec<u8>) -> String {
        if let Some(key) = self.all().next() {
            let tag = hmac::sign(key, &bytes);
            bytes.extend_from_slice(tag.as_ref());
        }
        BASE64_URL_SAFE_NO_PAD.encode(bytes)
    }

    /// Returns the contents of `token`; `None` if the token was not sealed with any of the keys, or
    /// if the reservation is of another kind.
    pub(crate) fn open(&self, token: &str, kind: ReservationKind) -> Option<TokenContents> {
        // Most tokens fit into the buffer without an allocation.
        let mut buffer = SmallVec::from_buf([0; USUAL_BYTES]);
        let max_length = base64::decoded_len_estimate(token.len());
        if max_length > USUAL_BYTES {
            buffer.resize(max_length, 0);
        }
        let length = BASE64_URL_SAFE_NO_PAD.decode_slice(token, &mut buffer);
        let bytes = buffer.get(..length.ok()?)?;
        let at = bytes.len().checked_sub(TAG_BYTES)?;
        let (contents, tag) = bytes.split_at(at);
        let is_sealed = self
            .all()
            .any(|key| hmac::verify(key, contents, tag).is_ok());
        if !is_sealed {
            return None;
        }
        TokenContents::decode(contents).filter(|contents| contents.head.kind == kind)
    }
}

/// A charge to encode, with its receipt.
struct EncodedCharge<'c> {
    key: &'c [u8],
    cost: Cost,
    is_stretched: bool,
    plan: Option<&'c str>,
    limits: Option<&'c Limits>,
    receipt: &'c [u8],
}

impl<'c> EncodedCharge<'c> {
    fn of_owned(charge: &'c OwnedCharge, receipt: &'c [u8]) -> Self {
        Self {
            key: &charge.key,
            cost: charge.cost,
            is_stretched: charge.is_stretched(),
            plan: charge.plan(),
            limits: Some(charge.limits()),
            receipt,
        }
    }

    fn of_shared(shared: &'c SharedCharge) -> Self {
        Self {
            key: &shared.charge.key,
            cost: shared.charge.cost,
            is_stretched: shared.charge.is_stretched,
            plan: shared.charge.plan.as_deref(),
            limits: shared.limits.as_deref(),
            receipt: &shared.receipt,
        }
    }

    fn push_to(&self, bytes: &mut Vec<u8>) {
        push_with_length(bytes, self.key);
        bytes.extend_from_slice(&self.cost.units().to_be_bytes());
        let has_plan = if self.plan.is_some() { HAS_PLAN } else { 0 };
        let is_stretched = if self.is_stretched { IS_STRETCHED } else { 0 };
        let has_limits = if self.limits.is_some() { HAS_LIMITS } else { 0 };
        bytes.push(is_stretched | has_plan | has_limits);
        if let Some(plan) = self.plan {
            push_with_length(bytes, plan.as_bytes());
        }
        if let Some(limits) = self.limits {
            push_with_own_length(bytes, |bytes| stored_limits::encode_to(bytes, limits));
        }
        push_with_length(bytes, self.receipt);
    }
}

impl TokenHead {
    /// Encodes the contents of a token whose `charges` are in Redis, with `receipts`.
    pub(crate) fn encode_with(&self, charges: &OwnedCharges, receipts: &[Vec<u8>]) -> Vec<u8> {
        let with_receipts = charges.list().iter().zip(receipts);
        let encoded =
            with_receipts.map(|(charge, receipt)| EncodedCharge::of_owned(charge, receipt));
        self.encode_charges(encoded)
    }

    fn encode_charges<'c>(&self, charges: impl Iterator<Item = EncodedCharge<'c>>) -> Vec<u8> {
        let mut bytes = self.encode(IN_REDIS);
        for charge in charges {
            charge.push_to(&mut bytes);
        }
        bytes
    }

    /// Encodes the contents of a token up to the byte `holder`.
    fn encode(&self, holder: u8) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(USUAL_BYTES);
        bytes.extend_from_slice(&[VERSION, self.kind as u8]);
        bytes.extend_from_slice(&self.id);
        bytes.extend_from_slice(&self.expires.as_micros().to_be_bytes());
        bytes.extend_from_slice(&self.cost.units().to_be_bytes());
        bytes.push(holder);
        bytes
    }
}

impl TokenContents {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let head = &self.head;
        match &self.charges {
            TokenCharges::None => head.encode(NOTHING),
            TokenCharges::OnServer => head.encode(ON_SERVER),
            TokenCharges::InRedis(shared) => {
                head.encode_charges(shared.iter().map(EncodedCharge::of_shared))
            }
        }
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut input = ReservationReader(bytes);
        if input.take(1)? != [VERSION] {
            return None;
        }
        let kind = match input.take(1)? {
            [1] => ReservationKind::Request,
            [2] => ReservationKind::Counters,
            _ => return None,
        };
        let id = input.take(16)?.try_into().ok()?;
        let expires = Timestamp::from_micros(input.number()?);
        let cost = Cost::new(input.number()?).ok()?;
        let holder = input.take(1)?;
        let mut shared = Vec::new();
        while !input.0.is_empty() && shared.len() < MAX_CHARGES {
            let key = input.take_with_length()?;
            if key.len() > MAX_KEY_BYTES {
                return None;
            }
            let cost = Cost::new(input.number()?).ok()?;
            let &[flags] = input.take(1)? else {
                return None;
            };
            let plan = match flags & HAS_PLAN {
                0 => None,
                _ => Some(std::str::from_utf8(input.take_with_length()?).ok()?.into()),
            };
            let limits = match flags & HAS_LIMITS {
                0 => None,
                _ => Some(stored_limits::decode_cached(input.take_with_length()?)?),
            };
            let charge = StoredCharge {
                key: key.into(),
                cost,
                is_stretched: flags & IS_STRETCHED != 0,
                plan,
            };
            let receipt = input.take_with_length()?.to_vec();
            shared.push(SharedCharge {
                charge,
                limits,
                receipt,
            });
        }
        let charges = match holder {
            [NOTHING] => TokenCharges::None,
            [ON_SERVER] => TokenCharges::OnServer,
            _ => TokenCharges::InRedis(shared),
        };
        let head = TokenHead {
            kind,
            id,
            expires,
            cost,
        };
        input.0.is_empty().then_some(Self { head, charges })
    }
}

/// Appends the length of `part` in two bytes, followed by `part`.
fn push_with_length(bytes: &mut Vec<u8>, part: &[u8]) {
    push_with_own_length(bytes, |bytes| bytes.extend_from_slice(part));
}

/// Appends a part that `push` appends, preceded by its length.
fn push_with_own_length(bytes: &mut Vec<u8>, push: impl FnOnce(&mut Vec<u8>)) {
    let at = bytes.len();
    bytes.extend_from_slice(&[0; 2]);
    push(bytes);
    // A key has at most 1,024 bytes, a plan name at most 128 bytes, and limits and a receipt have
    // some bytes for each limit of a rule.
    let length = u16::try_from(bytes.len() - at - 2)
        .expect("keys, plans, limits and receipts are shorter than 64 KiB");
    bytes[at..at + 2].copy_from_slice(&length.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use tidegate_core::{Limit, Request, Rule, RuleSet, Scratch};

    use super::*;

    fn head(cost: Cost) -> TokenHead {
        TokenHead {
            kind: ReservationKind::Request,
            id: [7; 16],
            expires: Timestamp::from_micros(1_700_000_000_000_000),
            cost,
        }
    }

    fn contents() -> TokenContents {
        TokenContents {
            head: head(Cost::new(2_000).unwrap()),
            charges: TokenCharges::InRedis(vec![SharedCharge {
                charge: StoredCharge {
                    key: b"\xF9rule-key".as_slice().into(),
                    cost: Cost::ONE,
                    is_stretched: true,
                    plan: Some("pro".into()),
                },
                limits: None,
                receipt: vec![1, 2, 3],
            }]),
        }
    }

    fn open(keys: &TokenKeys, token: &str) -> Option<TokenContents> {
        keys.open(token, ReservationKind::Request)
    }

    #[test]
    fn a_token_survives_a_round_trip() {
        let keys = TokenKeys::new("secret");
        let opened = open(&keys, &keys.seal(&contents())).unwrap();
        assert_eq!(format!("{opened:?}"), format!("{:?}", contents()));
    }

    #[test]
    fn the_token_of_a_new_reservation_contains_its_charges() {
        let limits = |text: &str| vec![text.parse::<Limit>().unwrap()];
        let rule = Rule::new("api", limits("10/min")).unwrap();
        let rule = rule.keyed_by(&["user"]).unwrap();
        let plan = ("pro", limits("20/min"));
        let rule = rule.with_plans(Some("plan"), vec![plan]).unwrap();
        let rules = Arc::new(RuleSet::build(vec![rule], Vec::new()).unwrap());
        let (keys, parts) = (TokenKeys::new("secret"), vec![vec![1, 2, 3]]);
        for entries in [&[("user", "u1")][..], &[("user", "u2"), ("plan", "pro")]] {
            let (request, mut scratch) = (Request::new(entries, Cost::ONE), Scratch::default());
            let (request, head) = (request.unwrap(), head(Cost::ONE));
            let charges = rules.charges(&request, head.expires, &mut scratch);
            let charges = OwnedCharges::new(&rules, &charges.unwrap()).with_plans_of(&request);
            let token = keys.seal_new(&head, &charges, ChargesHolder::Redis(&parts));
            let contents = TokenContents {
                head,
                charges: TokenCharges::InRedis(SharedCharge::list(&charges, &parts)),
            };
            let head = &contents.head;
            assert_eq!(token, keys.seal(&contents));
            let opened = open(&keys, &token).unwrap();
            assert_eq!(keys.seal(&opened), token);
            let charged = charges.to_stored().remove(0);
            assert_eq!(charged.plan.is_some(), entries.len() == 2);
            let sealed = |holder| open(&keys, &keys.seal_new(head, &charges, holder)).unwrap();
            let nothing = sealed(ChargesHolder::None).charges;
            assert!(matches!(nothing, TokenCharges::None));
            let on_server = sealed(ChargesHolder::Server).charges;
            assert!(matches!(on_server, TokenCharges::OnServer));
        }
    }

    #[test]
    fn a_changed_token_is_rejected() {
        let keys = TokenKeys::new("secret");
        let bytes = BASE64_URL_SAFE_NO_PAD
            .decode(keys.seal(&contents()))
            .unwrap();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            let token = BASE64_URL_SAFE_NO_PAD.encode(&changed);
            assert!(open(&keys, &token).is_none(), "byte {at}");
            let truncated = BASE64_URL_SAFE_NO_PAD.encode(&bytes[..at]);
            assert!(open(&keys, &truncated).is_none(), "{at} bytes");
        }
        assert!(open(&keys, "").is_none());
        assert!(open(&keys, "not base64!").is_none());
    }

    #[test]
    fn a_token_of_another_kind_or_version_is_rejected() {
        let keys = TokenKeys::new("secret");
        let token = keys.seal(&contents());
        assert!(keys.open(&token, ReservationKind::Counters).is_none());
        // A version 1 token has its ID in place of the kind. The token is rejected even if the
        // first byte of the ID is a valid kind.
        let sealed = BASE64_URL_SAFE_NO_PAD.decode(token).unwrap();
        let mut former = sealed[..sealed.len() - TAG_BYTES].to_vec();
        former.remove(1);
        former[0] = 1;
        former[1] = ReservationKind::Request as u8;
        let tag = hmac::sign(keys.all().next().unwrap(), &former);
        former.extend_from_slice(tag.as_ref());
        assert!(open(&keys, &BASE64_URL_SAFE_NO_PAD.encode(former)).is_none());
    }

    #[test]
    fn a_former_key_still_opens_tokens() {
        let (old, both) = (TokenKeys::new("old"), TokenKeys::new("new old"));
        assert!(open(&both, &old.seal(&contents())).is_some());
        assert!(open(&old, &both.seal(&contents())).is_none());
        let new = TokenKeys::new("new");
        assert!(open(&new, &both.seal(&contents())).is_some());
    }
}
