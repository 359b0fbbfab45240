//! Sends events to an HTTP endpoint, signed as [Standard Webhooks] specifies.
//!
//! Each endpoint has its own thread and bounded queue, so that a slow endpoint delays neither
//! decisions nor other endpoints. The thread sends events in batches, and retries a failed batch.
//! Events that do not fit into the queue, and the events of an undeliverable batch, are counted as
//! lost.
//!
//! [Standard Webhooks]:
//! https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md

use std::{
    hash::{BuildHasher as _, RandomState},
    ops::{AddAssign, RangeInclusive},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use ring::hmac;
use tidegate::Clock;
use tidegate_config::EventType;
use tidegate_core::{Backoff, Jitter, Span, Timestamp};
use ureq::Agent;

use crate::{date::rfc3339, https_client};

/// The maximum number of queued events.
const MAX_QUEUED: usize = 1_024;

/// The maximum number of events in a batch.
const MAX_BATCH: usize = 100;

/// How long the thread waits for more events after the first event of a batch.
const BATCH_DELAY: Duration = Duration::from_secs(1);

/// The maximum duration of an attempt.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum number of attempts to deliver a batch. The delays between attempts add up to about a
/// minute.
const MAX_ATTEMPTS: u32 = 7;

/// How long shutdown waits for the queued events of all endpoints to be delivered.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// The permitted lengths of a key after `whsec_`, in bytes.
const KEY_BYTES: RangeInclusive<usize> = 24..=64;

/// The prefix of a secret in the Standard Webhooks notation.
const SECRET_PREFIX: &str = "whsec_";

/// The keys that sign an endpoint's messages.
pub struct WebhookSecret(Vec<hmac::Key>);

impl WebhookSecret {
    /// Parses one or more secrets, separated by spaces. Each message has one signature for each
    /// secret, so that the receiver can rotate its secret. A secret that begins with `whsec_`
    /// contains the key in base64. The characters of any other secret are the key itself.
    ///
    /// # Errors
    ///
    /// Rejects a string without a secret. Also rejects a secret that begins with `whsec_`, if its
    /// base64 is invalid or its key does not have 24 to 64 bytes. The message does not contain the
    /// secret.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let keys = text.split_ascii_whitespace().map(|secret| {
            let key = match secret.strip_prefix(SECRET_PREFIX) {
                Some(encoded) => {
                    let key = BASE64_STANDARD.decode(encoded).map_err(
                        |_| "has `whsec_` followed by invalid base64; copy the secret again",
                    )?;
                    if !KEY_BYTES.contains(&key.len()) {
                        return Err(
                            "has `whsec_` followed by a key that does not have 24 to 64 bytes; copy \
                             the secret again, or create another one",
                        );
                    }
                    key
                }
                None => secret.as_bytes().to_vec(),
            };
            Ok(hmac::Key::new(hmac::HMAC_SHA256, &key))
        });
        let keys: Vec<hmac::Key> = keys.collect::<Result<_, &'static str>>()?;
        if keys.is_empty() {
            return Err("is empty; set a secret such as whsec_ and 24 to 64 bytes in base64");
        }
        Ok(Self(keys))
    }

    /// Returns the value of the header `webhook-signature`.
    fn sign(&self, id: &str, timestamp: u64, payload: &str) -> String {
        let content = format!("{id}.{timestamp}.{payload}");
        let signatures = self.0.iter().map(|key| {
            let tag = hmac::sign(key, content.as_bytes());
            format!("v1,{}", BASE64_STANDARD.encode(tag))
        });
        signatures.collect::<Vec<_>>().join(" ")
    }
}

/// Hides the keys, because `Debug` output can reach logs.
impl std::fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WebhookSecret(…)")
    }
}

/// The settings of a webhook.
#[derive(Debug)]
pub struct WebhookSettings {
    /// The URL of the endpoint.
    pub url: String,
    /// The secrets that sign the messages.
    pub secret: WebhookSecret,
    /// The event types to send.
    pub types: Vec<EventType>,
}

/// A handle to the thread that sends events to an endpoint.
#[derive(Debug)]
pub(super) struct Webhook {
    /// The scheme and the authority of the URL. The rest of the URL can contain a credential.
    name: String,
    types: Vec<EventType>,
    /// The queue of events as JSON documents.
    queue: SyncSender<Arc<str>>,
    shared: Arc<WebhookState>,
}

/// The state that the handle and the thread share.
#[derive(Debug, Default)]
struct WebhookState {
    delivered: AtomicU64,
    lost: AtomicU64,
    failed_attempts: AtomicU64,
    progress: Mutex<DeliveryProgress>,
    /// Notified when the shutdown begins, and whenever events have been delivered or lost.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct DeliveryProgress {
    is_stopping: bool,
    /// The number of events that are queued or being sent.
    pending: u64,
}

impl WebhookState {
    /// Waits for `time`, or until the shutdown begins. Returns whether the shutdown has begun.
    fn wait(&self, time: Duration) -> bool {
        let is_running = |progress: &mut DeliveryProgress| !progress.is_stopping;
        self.wait_while(time, is_running).is_stopping
    }

    /// Waits for `time`, or until `condition` is false.
    fn wait_while(
        &self,
        time: Duration,
        condition: impl FnMut(&mut DeliveryProgress) -> bool,
    ) -> MutexGuard<'_, DeliveryProgress> {
        let waited = self
            .changed
            .wait_timeout_while(self.progress(), time, condition);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn progress(&self) -> MutexGuard<'_, DeliveryProgress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes `events` events from the pending events and adds them to `counter`. Events that were
    /// already counted as lost at shutdown are not counted again.
    fn settle(&self, events: usize, counter: &AtomicU64) {
        let mut progress = self.progress();
        let events = progress.pending.min(events as u64);
        progress.pending -= events;
        counter.fetch_add(events, Ordering::Relaxed);
        drop(progress);
        self.changed.notify_all();
    }
}

/// The event counts of an endpoint since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WebhookCounts {
    pub(super) delivered: u64,
    pub(super) lost: u64,
    pub(super) failed_attempts: u64,
}

impl AddAssign for WebhookCounts {
    fn add_assign(&mut self, other: Self) {
        self.delivered += other.delivered;
        self.lost += other.lost;
        self.failed_attempts += other.failed_attempts;
    }
}

impl Webhook {
    /// Starts the thread of an endpoint.
    ///
    /// # Errors
    ///
    /// Returns the operating system's error if the thread cannot be started.
    pub(super) fn start(settings: WebhookSettings, clock: Clock) -> std::io::Result<Self> {
        let (queue, events) = sync_channel(MAX_QUEUED);
        let shared = Arc::<WebhookState>::default();
        let WebhookSettings { url, secret, types } = settings;
        let name = origin(&url);
        let sender = Sender {
            agent: https_client::agent(TIMEOUT),
            name: name.clone(),
            url,
            secret,
            clock,
            // Receivers detect a repeated message by the ID, so a restarted process must not reuse
            // IDs.
            run: RandomState::new().hash_one("run"),
            batches: 0,
            reported_lost: 0,
            shared: Arc::clone(&shared),
        };
        thread::Builder::new()
            .name("webhook".to_owned())
            .spawn(move || sender.run(&events))?;
        Ok(Self {
            name,
            types,
            queue,
            shared,
        })
    }

    /// Queues an event, if the endpoint receives events of this type. Drops and counts the event if
    /// the queue is full.
    pub(super) fn send(&self, kind: EventType, document: &Arc<str>) {
        if !self.types.contains(&kind) {
            return;
        }
        self.shared.progress().pending += 1;
        if self.queue.try_send(Arc::clone(document)).is_err() {
            self.shared.settle(1, &self.shared.lost);
        }
    }

    /// Returns the scheme and the authority of the URL.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn counts(&self) -> WebhookCounts {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        WebhookCounts {
            delivered: load(&self.shared.delivered),
            lost: load(&self.shared.lost),
            failed_attempts: load(&self.shared.failed_attempts),
        }
    }

    /// Tells the thread to send the queued events, with only one attempt for each batch.
    fn begin_finish(&self) {
        self.shared.progress().is_stopping = true;
        self.shared.changed.notify_all();
    }

    /// Waits until the queued events are sent, for at most `time`. Then counts the events that are
    /// still queued as lost, and returns the number of these events.
    fn finish(&self, time: Duration) -> u64 {
        let has_pending = |progress: &mut DeliveryProgress| progress.pending > 0;
        let mut progress = self.shared.wait_while(time, has_pending);
        let lost = std::mem::take(&mut progress.pending);
        self.shared.lost.fetch_add(lost, Ordering::Relaxed);
        lost
    }
}

/// Waits until the events queued so far are sent, for at most 2 seconds. Logs how many events were
/// not delivered in time.
pub(super) fn finish(webhooks: &[Webhook]) {
    // All endpoints finish in parallel and share the 2 seconds.
    webhooks.iter().for_each(Webhook::begin_finish);
    // Use the real clock, because a test clock does not advance while this function waits.
    let clock = Clock::real();
    let began = clock.nanos();
    for webhook in webhooks {
        let events = webhook.finish(
            FINISH_TIMEOUT
                .saturating_sub(Duration::from_nanos(clock.nanos().saturating_sub(began))),
        );
        if events > 0 {
            tracing::error!(
                endpoint = webhook.name,
                events,
                "shutdown: events were not delivered to a webhook within {} s, and are lost",
                FINISH_TIMEOUT.as_secs()
            );
        }
    }
}

/// The thread of an endpoint.
struct Sender {
    agent: Agent,
    url: String,
    /// The scheme and the authority of the URL. The rest of the URL can contain a credential.
    name: String,
    secret: WebhookSecret,
    clock: Clock,
    run: u64,
    batches: u64,
    /// The number of lost events that the endpoint has already been told about.
    reported_lost: u64,
    shared: Arc<WebhookState>,
}

impl Sender {
    /// Sends events until the handle is dropped.
    fn run(mut self, queue: &Receiver<Arc<str>>) {
        while let Ok(first) = queue.recv() {
            let mut batch = vec![first];
            self.shared.wait(BATCH_DELAY);
            batch.extend(queue.try_iter().take(MAX_BATCH - 1));
            self.deliver(&batch);
        }
    }

    /// Sends a batch, and retries until the endpoint has accepted it.
    fn deliver(&mut self, batch: &[Arc<str>]) {
        self.batches += 1;
        let id = format!("msg_{:016x}_{}", self.run, self.batches);
        let lost = self.shared.lost.load(Ordering::Relaxed);
        let payload = payload(batch, lost - self.reported_lost, self.clock.now());
        let backoff = Backoff::new(Span::from_secs(1), Span::from_secs(30), Jitter::Equal);
        let mut attempt = 0;
        let problem = loop {
            let problem = match self.attempt(&id, &payload) {
                Ok(()) => {
                    self.shared.settle(batch.len(), &self.shared.delivered);
                    self.reported_lost = lost;
                    return;
                }
                Err(problem) => problem,
            };
            self.shared.failed_attempts.fetch_add(1, Ordering::Relaxed);
            attempt += 1;
            let random = RandomState::new().hash_one(attempt);
            let wait = Duration::from_micros(backoff.wait(attempt - 1, random).as_micros());
            let is_final = attempt == MAX_ATTEMPTS || !problem.is_temporary;
            if is_final || self.shared.wait(wait) {
                break problem;
            }
        };
        self.shared.settle(batch.len(), &self.shared.lost);
        tracing::error!(
            endpoint = self.name,
            events = batch.len(),
            attempts = attempt,
            "events were not delivered to a webhook, and are lost: {}; check the endpoint, or remove it from `events.webhooks`",
            problem.text
        );
    }

    fn attempt(&self, id: &str, payload: &str) -> Result<(), DeliveryFailure> {
        let timestamp = self.clock.now().as_micros() / 1_000_000;
        let answered = self
            .agent
            .post(&self.url)
            .header("content-type", "application/json")
            .header(
                "user-agent",
                concat!("tidegate/", env!("CARGO_PKG_VERSION")),
            )
            .header("webhook-id", id)
            .header("webhook-timestamp", timestamp.to_string())
            .header(
                "webhook-signature",
                self.secret.sign(id, timestamp, payload),
            )
            .send(payload);
        match answered {
            Ok(answer) if answer.status().is_success() => Ok(()),
            Ok(answer) => {
                let status = answer.status();
                let is_temporary =
                    status.is_server_error() || matches!(status.as_u16(), 408 | 425 | 429);
                let text = format!("the endpoint answered with status {status}");
                Err(DeliveryFailure { is_temporary, text })
            }
            Err(error) => Err(DeliveryFailure {
                is_temporary: true,
                text: match error {
                    ureq::Error::Timeout(_) => {
                        format!("no complete response within {} s", TIMEOUT.as_secs())
                    }
                    error => error.to_string(),
                },
            }),
        }
    }
}

/// The reason why an attempt failed.
struct DeliveryFailure {
    /// Whether another attempt can succeed without a configuration change.
    is_temporary: bool,
    text: String,
}

/// Returns the message that contains the events of `batch`. `lost` is the number of events that
/// were lost since the last message.
fn payload(batch: &[Arc<str>], lost: u64, now: Timestamp) -> String {
    let (timestamp, events) = (rfc3339(now), batch.join(","));
    format!(
        r#"{{"type":"tidegate.events","timestamp":"{timestamp}","data":{{"events":[{events}],"lost":{lost}}}}}"#
    )
}

/// Returns the scheme and the authority of `url`.
fn origin(url: &str) -> String {
    let end = url.find("://").map_or(0, |at| at + 3);
    let rest = url[end..].find(['/', '?', '#']);
    url[..rest.map_or(url.len(), |rest| end + rest)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test vector of the Standard Webhooks reference libraries.
    #[test]
    fn signatures_match_the_reference_libraries() {
        let secret = WebhookSecret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let signed = secret.sign(
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1_614_265_330,
            r#"{"test": 2432232314}"#,
        );
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn several_secrets_sign_each_message() {
        let [one, two] = ["first", "second"].map(|text| WebhookSecret::parse(text).unwrap());
        let both = WebhookSecret::parse("first second").unwrap();
        let sign = |secret: &WebhookSecret| secret.sign("id", 1, "{}");
        assert_eq!(sign(&both), format!("{} {}", sign(&one), sign(&two)));
        assert!(WebhookSecret::parse(" ").is_err());
        let problem = WebhookSecret::parse("whsec_not*base64").unwrap_err();
        assert!(problem.contains("base64"), "{problem}");
        for bytes in [0, 23, 65] {
            let secret = format!("whsec_{}", BASE64_STANDARD.encode(vec![b'k'; bytes]));
            let problem = WebhookSecret::parse(&secret).unwrap_err();
            assert!(problem.contains("24 to 64 bytes"), "{bytes}: {problem}");
        }
        let longest = format!("whsec_{}", BASE64_STANDARD.encode([b'k'; 64]));
        assert!(WebhookSecret::parse(&longest).is_ok());
        assert!(!format!("{both:?}").contains("first"));
    }

    #[test]
    fn a_message_contains_the_events_and_the_number_of_lost_events() {
        let event = |number: u32| -> Arc<str> { format!(r#"{{"id":{number}}}"#).into() };
        let now = Timestamp::from_micros(1_700_000_000_123_456);
        let text = payload(&[event(1), event(2)], 7, now);
        let message: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(message["type"], "tidegate.events");
        assert_eq!(message["timestamp"], "2023-11-14T22:13:20.123Z");
        assert_eq!(message["data"]["events"][1]["id"], 2);
        assert_eq!(message["data"]["lost"], 7);
    }

    #[test]
    fn only_the_origin_of_a_url_is_logged() {
        for (url, expected) in [
            (
                "https://example.com/hook?token=secret",
                "https://example.com",
            ),
            ("http://127.0.0.1:9000", "http://127.0.0.1:9000"),
            ("http://example.com?token", "http://example.com"),
        ] {
            assert_eq!(origin(url), expected);
        }
    }
}
