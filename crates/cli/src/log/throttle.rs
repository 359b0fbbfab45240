//! A rate limit on log records that clients can cause. The limit applies before all log outputs.

use tidegate_net::log_throttle::{LogThrottle, ThrottleDecision};
use tracing::{
    Event, Level, Metadata, Subscriber,
    callsite::{Callsite, Identifier},
    field::Value,
    metadata::Kind,
    span::{Attributes, Id, Record},
    subscriber::Interest,
};
use tracing_subscriber::{Layer, layer::Context, registry::LookupSpan};

/// Modules that log only in response to operator actions, such as the start or a reload. The
/// records of these modules are not throttled, because a rules file may cause hundreds of warnings.
const UNTHROTTLED: [&str; 3] = [
    tidegate_server::serve::LOG_TARGET,
    tidegate_server::reload::LOG_TARGET,
    tidegate_envoy::CONFIG_LOG_TARGET,
];

const SUPPRESSED: &str = "suppressed records similar to the next one";

/// The metadata of the record that reports suppressed records. The record must bypass the
/// operator's filter, so its metadata is constructed here instead of by a logging macro.
static NOTE: Metadata<'static> = tracing::metadata! {
    name: "suppressed records",
    target: "tidegate::log",
    level: Level::INFO,
    fields: &["message", "suppressed", "suppressed_target"],
    callsite: &NOTE_CALLSITE,
    kind: Kind::EVENT,
};

static NOTE_CALLSITE: NoteCallsite = NoteCallsite;

struct NoteCallsite;

impl Callsite for NoteCallsite {
    fn set_interest(&self, _: Interest) {}

    fn metadata(&self) -> &Metadata<'_> {
        &NOTE
    }
}

/// A layer that drops records that its [`LogThrottle`] does not admit. All log outputs share one
/// limit.
pub(super) struct ThrottledLayer<L> {
    inner: L,
    throttle: LogThrottle<Identifier>,
}

impl<L> ThrottledLayer<L> {
    pub(super) fn new(inner: L, throttle: LogThrottle<Identifier>) -> Self {
        Self { inner, throttle }
    }
}

impl<S, L> Layer<S> for ThrottledLayer<L>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    L: Layer<S>,
{
    fn on_layer(&mut self, subscriber: &mut S) {
        self.inner.on_layer(subscriber);
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        // At `debug` and `trace` level, operators want every record.
        let is_verbose = *metadata.level() > Level::INFO;
        if is_verbose || UNTHROTTLED.contains(&metadata.target()) {
            return self.inner.on_event(event, context);
        }
        match self.throttle.admit(metadata.callsite()) {
            ThrottleDecision::Suppress => {}
            ThrottleDecision::Write { suppressed } => {
                if suppressed > 0 {
                    let (message, target) = (format_args!("{SUPPRESSED}"), metadata.target());
                    let values: [Option<&dyn Value>; 3] =
                        [Some(&message), Some(&suppressed), Some(&target)];
                    let values = NOTE.fields().value_set_all(&values);
                    self.inner
                        .on_event(&Event::new(&NOTE, &values), context.clone());
                }
                self.inner.on_event(event, context);
            }
        }
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        self.inner.on_new_span(attributes, id, context);
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        self.inner.on_record(id, values, context);
    }

    fn on_follows_from(&self, id: &Id, follows: &Id, context: Context<'_, S>) {
        self.inner.on_follows_from(id, follows, context);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        self.inner.on_enter(id, context);
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        self.inner.on_exit(id, context);
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        self.inner.on_close(id, context);
    }

    fn on_id_change(&self, old: &Id, new: &Id, context: Context<'_, S>) {
        self.inner.on_id_change(old, new, context);
    }
}
