//! The door without sockets, for fuzzing: messages in, messages out.

use std::{sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use prost::Message as _;
use tokio::sync::mpsc;

use super::{
    proto::envoy::service::rate_limit_quota::v3::RateLimitQuotaUsageReports,
    quota::{self, Conversation},
    rate_limit,
};
use crate::{envoy::RateLimitService, limiter::Limiter, quota::Assigned};

/// The message with which `ShouldRateLimit` answers `message`, or the text of its refusal. Without a fleet.
///
/// # Errors
///
/// The text, with its code.
pub fn rate_limit_transcript(
    service: &RateLimitService,
    message: &[u8],
) -> Result<Vec<u8>, (i32, String)> {
    // In memory a decision never suspends.
    let decided = rate_limit::decide(Some(service), message, Duration::MAX).now_or_never();
    let Some(decided) = decided else {
        let alone = "a decision of a fleet has to be waited for";
        return Err((tonic::Code::Internal.into(), alone.to_owned()));
    };
    let encoded = decided.map(|answer| answer.encode_to_vec());
    encoded.map_err(|status| (status.code().into(), status.message().to_owned()))
}

/// A stream of reports without its connection; it leaves when it is dropped.
#[derive(Debug)]
pub struct QuotaStream {
    limiter: Arc<Limiter>,
    conversation: Conversation,
    inbox: mpsc::Receiver<Assigned>,
}

impl QuotaStream {
    /// A new stream.
    #[must_use]
    pub fn open(limiter: &Arc<Limiter>) -> Self {
        let limiter = Arc::clone(limiter);
        let (conversation, inbox) = Conversation::new(Arc::clone(&limiter));
        Self {
            limiter,
            conversation,
            inbox,
        }
    }

    /// Reports what `message` says.
    ///
    /// # Errors
    ///
    /// The text of the refusal, which ends a stream.
    pub fn report(&mut self, message: &[u8]) -> Result<(), String> {
        let reports = RateLimitQuotaUsageReports::decode(message);
        let reports = reports.map_err(|error| error.to_string())?;
        let heard = self.conversation.hear(reports);
        heard.map_err(|status| status.message().to_owned())
    }

    /// Begins the windows whose time it is.
    pub fn roll(&self) {
        let (quotas, now) = (self.limiter.quotas(), self.limiter.now());
        let stream = self.conversation.stream;
        if quotas.next_window(stream).is_some_and(|end| end <= now) {
            quotas.roll(stream, now);
        }
    }

    /// The messages that were sent since the last time.
    pub fn hear(&mut self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.inbox.try_recv().ok())
            .map(|assigned| quota::written(assigned).encode_to_vec())
            .collect()
    }
}
