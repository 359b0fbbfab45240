//! `GET /v1/events` returns events as they happen, as server-sent events, or the recent events as
//! JSON.
//!
//! The format is defined by the [HTML standard]. A client that reconnects with `Last-Event-ID`
//! receives the later events, if these events are still in memory. After a server restart, it
//! receives all events of the new process. While there are no events, the server sends comments, so
//! that lost connections are detected.
//!
//! [HTML standard]: https://html.spec.whatwg.org/multipage/server-sent-events.html

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream, stream};
use http_body_util::Full;
use hyper::{
    Request, Response, StatusCode,
    body::{Body, Bytes, Frame, Incoming, SizeHint},
    header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue},
};
use serde_json::{Value, json};
use tidegate_limiter::{
    ServerLimiter,
    events::{
        EventId, EventList, EventSubscription, MAX_RECENT_EVENTS, MAX_SUBSCRIBERS, StreamItem,
    },
};
use tidegate_net::{Phase, Problem, ResponsePhase, Shutdown, response::json};

use super::{super::http::serve::ResponseBody, query::Query};

/// If there is no event for this time, the server sends a comment.
const HEARTBEAT: Duration = Duration::from_secs(15);

/// The body of an admin listener response.
pub(super) enum AdminBody {
    /// A body that is complete in memory.
    Full(Full<Bytes>),
    /// Events, until the client closes the connection or the server shuts down.
    Events(EventBody),
}

/// A stream of events.
pub(super) struct EventBody {
    frames: Pin<Box<dyn Stream<Item = Bytes> + Send>>,
    /// While this value exists, the connection has no read timeout.
    phase: Option<ResponsePhase>,
}

impl Body for AdminBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Self::Full(body) => Pin::new(body).poll_frame(context),
            Self::Events(EventBody { frames, phase }) => {
                let frame = frames.as_mut().poll_next(context);
                if let Poll::Ready(None) = frame {
                    *phase = None;
                }
                frame.map(|frame| frame.map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(body) => body.is_end_stream(),
            Self::Events(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(body) => body.size_hint(),
            Self::Events(_) => SizeHint::default(),
        }
    }
}

impl ResponseBody for AdminBody {
    fn begin(&mut self, phase: &Phase) {
        match self {
            Self::Full(body) => body.begin(phase),
            Self::Events(body) => body.phase = Some(phase.begin_response()),
        }
    }
}

/// Responds with the events that follow the last event that the client received. A client that
/// sends no event ID receives all recent events. With the parameter `n`, the response is a JSON
/// list.
pub(super) fn serve(
    limiter: &Arc<ServerLimiter>,
    request: &Request<Incoming>,
    shutdown: Shutdown,
) -> Result<Response<AdminBody>, Problem> {
    let query = Query::parse(request.uri().query(), &["after", "n"], None)?;
    let header = request.headers().get("last-event-id");
    let header = header.and_then(|value| value.to_str().ok());
    let after = query.get("after").or(header);
    // An invalid ID is handled like the ID of an earlier process: it matches no event, and the
    // client receives all recent events.
    let after = after.map(|after| after.parse::<EventId>().unwrap_or_default());
    let Some(events) = limiter.events() else {
        let detail =
            "events are off; remove `events: off` from the rules file, and restart the server";
        return Err(Problem::new(StatusCode::CONFLICT, detail));
    };
    if query.get("n").is_some() {
        let most = query.count(MAX_RECENT_EVENTS, MAX_RECENT_EVENTS)?;
        let list = list(&events.list(after, most));
        return Ok(json(StatusCode::OK, &list).map(AdminBody::Full));
    }
    let subscription = events.subscribe(after.unwrap_or_default()).ok_or_else(|| {
        let detail = format!(
            "the maximum of {MAX_SUBSCRIBERS} clients already follow the events; close one of them"
        );
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    })?;
    let mut response = Response::new(AdminBody::Events(EventBody {
        frames: Box::pin(frames(subscription, shutdown)),
        phase: None,
    }));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

fn list(list: &EventList) -> Value {
    let events = list.events.iter();
    // An event is a valid JSON document.
    let events: Vec<Value> = events
        .filter_map(|event| serde_json::from_str(&event.json).ok())
        .collect();
    json!({"events": events, "missed": list.missed})
}

/// Encodes the events of `subscription` as a byte stream.
fn frames(subscription: EventSubscription, shutdown: Shutdown) -> impl Stream<Item = Bytes> + Send {
    // The first comment immediately tells the client that the stream has begun.
    let first = stream::iter([Bytes::from_static(b": events\n\n")]);
    let stopping = async move { shutdown.begun().await };
    let state = (subscription, Box::pin(stopping));
    let rest = stream::unfold(state, |(mut subscription, mut stopping)| async move {
        let item = tokio::select! {
            () = &mut stopping => return None,
            item = tokio::time::timeout(HEARTBEAT, subscription.next()) => item,
        };
        let frame = match item {
            Err(_) => Bytes::from_static(b": no event\n\n"),
            Ok(None) => return None,
            Ok(Some(StreamItem::Event(event))) => {
                format!("id: {}\ndata: {}\n\n", event.id, event.json).into()
            }
            Ok(Some(StreamItem::Missed(count))) => {
                format!("event: missed\ndata: {{\"missed\":{count}}}\n\n").into()
            }
        };
        Some((frame, (subscription, stopping)))
    });
    stream::StreamExt::chain(first, rest)
}
