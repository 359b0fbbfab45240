//! Tests the providers' responses, cut into pieces at every position.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn scan(pieces: &[&[u8]]) -> UsageScanner {
    let mut scanner = UsageScanner::default();
    for piece in pieces {
        scanner.scan(piece);
    }
    scanner
}

fn tokens(input: u64, cached: u64, output: u64) -> Option<TokenUsage> {
    Some(TokenUsage {
        input,
        cached,
        output,
    })
}

/// Checks the usage of a complete response, in one piece and cut in two at every byte.
fn assert_usage(body: &str, expected: Option<TokenUsage>) {
    for cut in 0..=body.len() {
        let (first, second) = body.as_bytes().split_at(cut);
        let scanner = scan(&[first, second]);
        assert_eq!(scanner.usage(), expected, "cut at {cut}: {body}");
        assert_eq!(scanner.usage_at_end(true), expected, "cut at {cut}: {body}");
        assert!(!scanner.was_clamped());
    }
    let bytes: Vec<&[u8]> = body.as_bytes().chunks(1).collect();
    assert_eq!(scan(&bytes).usage(), expected, "{body}");
}

const OPENAI_CHAT: &str = r#"{
  "id": "chatcmpl-B9MBs8CjcvOU2jLn4n570S5qMJKcT",
  "object": "chat.completion",
  "created": 1741569952,
  "model": "gpt-4.1-2025-04-14",
  "choices": [
    {
      "index": 0,
      "message": {
        "role": "assistant",
        "content": "The \"usage\": {\"prompt_tokens\": 99999} is \\ not \u0022this\u0022.",
        "refusal": null,
        "annotations": []
      },
      "logprobs": null,
      "finish_reason": "stop"
    }
  ],
  "usage": {
    "prompt_tokens": 2006,
    "completion_tokens": 300,
    "total_tokens": 2306,
    "prompt_tokens_details": {"cached_tokens": 1920, "audio_tokens": 0},
    "completion_tokens_details": {
      "reasoning_tokens": 64,
      "audio_tokens": 0,
      "accepted_prediction_tokens": 0,
      "rejected_prediction_tokens": 0
    }
  },
  "service_tier": "default",
  "system_fingerprint": "fp_06737a9306"
}
"#;

const OPENAI_CHAT_STREAM: &str = "\
data: {\"id\":\"chatcmpl-123\",\"object\":\"chat.completion.chunk\",\"created\":1694268190,\"model\":\"gpt-4o-mini\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}

data: {\"id\":\"chatcmpl-123\",\"object\":\"chat.completion.chunk\",\"created\":1694268190,\"model\":\"gpt-4o-mini\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hello\"},\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}

data: {\"id\":\"chatcmpl-123\",\"object\":\"chat.completion.chunk\",\"created\":1694268190,\"model\":\"gpt-4o-mini\",\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":null}

data: {\"id\":\"chatcmpl-123\",\"object\":\"chat.completion.chunk\",\"created\":1694268190,\"model\":\"gpt-4o-mini\",\"choices\":[],\"usage\":{\"prompt_tokens\":19,\"completion_tokens\":10,\"total_tokens\":29,\"prompt_tokens_details\":{\"cached_tokens\":0},\"completion_tokens_details\":{\"reasoning_tokens\":0}}}

data: [DONE]

";

const OPENAI_RESPONSES: &str = r#"{"id":"resp_67ccd2bed1ec8190b14f964abc054267","object":"response","created_at":1741476542,"status":"completed","error":null,"model":"gpt-4.1-2025-04-14","output":[{"type":"message","id":"msg_67","status":"completed","role":"assistant","content":[{"type":"output_text","text":"In a peaceful grove","annotations":[]}]}],"parallel_tool_calls":true,"temperature":1.0,"usage":{"input_tokens":36,"input_tokens_details":{"cached_tokens":30},"output_tokens":87,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":123},"user":null,"metadata":{}}"#;

const OPENAI_RESPONSES_STREAM: &str = "\
event: response.created
data: {\"type\":\"response.created\",\"response\":{\"id\":\"resp_67c9\",\"object\":\"response\",\"status\":\"in_progress\",\"usage\":null}}

event: response.output_text.delta
data: {\"type\":\"response.output_text.delta\",\"item_id\":\"msg_67c9\",\"output_index\":0,\"content_index\":0,\"delta\":\"Hi\"}

event: response.completed
data: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_67c9\",\"object\":\"response\",\"status\":\"completed\",\"output\":[{\"id\":\"msg_67c9\",\"content\":[{\"type\":\"output_text\",\"text\":\"Hi\"}]}],\"usage\":{\"input_tokens\":37,\"input_tokens_details\":{\"cached_tokens\":0},\"output_tokens\":11,\"output_tokens_details\":{\"reasoning_tokens\":0},\"total_tokens\":48}}}

";

const ANTHROPIC: &str = r#"{"id":"msg_01XFDUDYJgAACzvnptvVoYEL","type":"message","role":"assistant","model":"claude-sonnet-4-5","content":[{"type":"text","text":"Hello!"},{"type":"tool_use","id":"toolu_01","name":"get","input":{"usage":{"output_tokens":1000000}}}],"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":21,"cache_creation_input_tokens":188086,"cache_read_input_tokens":3000,"cache_creation":{"ephemeral_5m_input_tokens":188086,"ephemeral_1h_input_tokens":0},"output_tokens":393,"service_tier":"standard"}}"#;

const ANTHROPIC_STREAM: &str = "\
event: message_start\r
data: {\"type\":\"message_start\",\"message\":{\"id\":\"msg_1nZdL29xx5MUA1yADyHTEsnR8uuvGzszyY\",\"type\":\"message\",\"role\":\"assistant\",\"content\":[],\"model\":\"claude-sonnet-4-5\",\"stop_reason\":null,\"stop_sequence\":null,\"usage\":{\"input_tokens\":25,\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":40,\"output_tokens\":1}}}\r
\r
event: content_block_start\r
data: {\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}\r
\r
event: ping\r
data: {\"type\":\"ping\"}\r
\r
event: content_block_delta\r
data: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"Hello there, my friend!\"}}\r
\r
event: content_block_stop\r
data: {\"type\":\"content_block_stop\",\"index\":0}\r
\r
event: message_delta\r
data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\",\"stop_sequence\":null},\"usage\":{\"output_tokens\":15}}\r
\r
event: message_stop\r
data: {\"type\":\"message_stop\"}\r
\r
";

const GEMINI: &str = r#"{
  "candidates": [
    {"content": {"parts": [{"text": "Hi"}], "role": "model"}, "finishReason": "STOP"}
  ],
  "usageMetadata": {
    "promptTokenCount": 1000,
    "cachedContentTokenCount": 900,
    "candidatesTokenCount": 20,
    "thoughtsTokenCount": 300,
    "toolUsePromptTokenCount": 7,
    "totalTokenCount": 1327,
    "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 1000}]
  },
  "modelVersion": "gemini-2.5-flash"
}
"#;

#[test]
fn the_usage_of_each_provider_is_read() {
    assert_usage(OPENAI_CHAT, tokens(86, 1_920, 300));
    assert_usage(OPENAI_CHAT_STREAM, tokens(19, 0, 10));
    assert_usage(OPENAI_RESPONSES, tokens(6, 30, 87));
    assert_usage(OPENAI_RESPONSES_STREAM, tokens(37, 0, 11));
    assert_usage(ANTHROPIC, tokens(188_107, 3_000, 393));
    assert_usage(ANTHROPIC_STREAM, tokens(25, 40, 15));
    assert_usage(GEMINI, tokens(107, 900, 320));
}

#[test]
fn a_gemini_stream_is_an_array_or_an_event_stream() {
    let chunk = |output: u64| {
        json!({
            "candidates": [{"content": {"parts": [{"text": "Hi"}]}}],
            "usageMetadata": {"promptTokenCount": 4, "candidatesTokenCount": output},
        })
    };
    let array = format!("[{},\r\n{}\n]", chunk(3), chunk(9));
    assert_usage(&array, tokens(4, 0, 9));
    let events = format!("data: {}\n\ndata: {}\n\n", chunk(3), chunk(9));
    assert_usage(&events, tokens(4, 0, 9));
}

#[test]
fn an_embedding_has_no_output() {
    let body = r#"{"object":"list","data":[{"embedding":[0.1,-0.2e-3]}],"usage":{"prompt_tokens":8,"total_tokens":8}}"#;
    assert_usage(body, tokens(8, 0, 0));
}

#[test]
fn a_gateway_may_mix_the_members_of_two_providers() {
    let body = r#"{"usage":{"prompt_tokens":100,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":60},"cache_read_input_tokens":60,"cache_creation_input_tokens":30}}"#;
    assert_usage(body, tokens(40, 60, 5));
}

#[test]
fn only_the_members_of_the_usage_count() {
    for body in [
        "",
        "   ",
        "null",
        "<html>usage</html>",
        r#"{"usage":null}"#,
        r#"{"usage":[{"prompt_tokens":1}]}"#,
        r#"{"usage":{"prompt_tokens":"12"}}"#,
        r#"{"usage":{"prompt_tokens":-12}}"#,
        r#"{"usage":{"prompt_tokens":12.0}}"#,
        r#"{"usage":{"prompt_tokens":1e3}}"#,
        r#"{"usage":{"prompt_tokens":true,"completion_tokens":[3]}}"#,
        r#"{"usage":{"details":{"prompt_tokens":12}}}"#,
        r#"{"choices":[{"usage":{"prompt_tokens":12}}]}"#,
        r#"{"choices":[{"message":{"usage":{"prompt_tokens":12}}}]}"#,
        r#"[[{"usage":{"prompt_tokens":12}}]]"#,
        "data: {\"usage\"\n\ndata: :{\"prompt_tokens\":12}}\n\n",
        ": {\"usage\":{\"prompt_tokens\":12}}\n\n",
        "databases: {\"usage\":{\"prompt_tokens\":12}}\n\n",
    ] {
        assert_usage(body, None);
    }
}

#[test]
fn escapes_white_space_and_broken_lines_do_not_matter() {
    for body in [
        "\u{feff}data:{\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":3}}\n\n",
        "data: {\"usage\":\ndata: {\"prompt_tokens\":12\ndata: ,\"completion_tokens\":3}}\n\n",
        "data: {\"usage\":\rdata: {\"prompt_tokens\":12,\rdata:\"completion_tokens\":3}}\r\r",
        "\n\r\n{\"us\\u0061ge\" :\t{ \"prompt\\u005Ftokens\" : 12 , \"completion_tokens\":3 } }",
        "{\"a\":1}\n{\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":3}}\n",
        "event: x\nid: 7\nretry: 10\ndata: {\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":3}}",
        "{\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":2,\"completion_tokens\":3}}",
    ] {
        assert_usage(body, tokens(12, 0, 3));
    }
}

#[test]
fn a_number_that_has_not_ended_is_not_read() {
    let scanner = scan(&[b"{\"usage\":{\"prompt_tokens\":12"]);
    assert_eq!(scanner.usage(), None);
    let scanner = scan(&[b"{\"usage\":{\"prompt_tokens\":12", b"3}"]);
    assert_eq!(scanner.usage(), tokens(123, 0, 0));
}

#[test]
fn a_cut_stream_counts_the_text_that_was_seen() {
    let delta = ANTHROPIC_STREAM.find("event: content_block_stop").unwrap();
    let cut = scan(&[&ANTHROPIC_STREAM.as_bytes()[..delta]]);
    assert_eq!(cut.usage(), tokens(25, 40, 1));
    // 23 bytes of text are counted as 6 tokens.
    assert_eq!(cut.usage_at_end(false), tokens(25, 40, 6));
    // Even if the upstream ends the stream properly, the final usage is missing.
    assert_eq!(cut.usage_at_end(true), tokens(25, 40, 6));
    let complete = scan(&[ANTHROPIC_STREAM.as_bytes()]);
    assert_eq!(complete.usage_at_end(true), tokens(25, 40, 15));
    let before_usage = scan(&[&OPENAI_CHAT_STREAM.as_bytes()[..600]]);
    assert_eq!(before_usage.usage_at_end(false), None);
}

#[test]
fn an_implausible_number_is_clamped() {
    for number in ["1000000001", "18446744073709551616", &"9".repeat(400)] {
        let body = format!("{{\"usage\":{{\"prompt_tokens\":{number},\"completion_tokens\":4}}}}");
        let scanner = scan(&[body.as_bytes()]);
        assert_eq!(scanner.usage(), tokens(bounds::MAX_TOKENS, 0, 4));
        assert!(scanner.was_clamped());
    }
    let lie = r#"{"usage":{"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":9}}}"#;
    assert_usage(lie, tokens(0, 9, 0));
}

#[test]
fn nesting_has_no_maximum() {
    let body = format!(
        "{{\"a\":{}1{},\"usage\":{{\"prompt_tokens\":12}}}}",
        "[{\"b\":".repeat(10_000),
        "}]".repeat(10_000)
    );
    assert_eq!(scan(&[body.as_bytes()]).usage(), tokens(12, 0, 0));
}

/// The scanner reads each byte once and has no heap memory, so a long array, or a body that never
/// ends, needs only time in proportion to its length.
#[test]
fn a_large_body_takes_no_more_memory_than_a_small_one() {
    assert!(size_of::<UsageScanner>() <= 512);
    assert!(!std::mem::needs_drop::<UsageScanner>(), "no heap memory");
    let mut scanner = scan(&[b"{\"data\":[0"]);
    for _ in 0..1_000 {
        scanner.scan(&b",{\"usage\":{\"prompt_tokens\":9}},[1,[]],\"x\"".repeat(100));
    }
    assert_eq!(scanner.usage(), None, "the elements are not the usage");
    scanner.scan(b"],\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":3}}");
    assert_eq!(scanner.usage(), tokens(12, 0, 3));
}

/// Returns the usage of a document by parsing the whole document.
fn naive(document: &Value) -> Option<TokenUsage> {
    let at = |pointer: &str| document.pointer(pointer).and_then(Value::as_u64);
    let count = |pointers: &[&str]| pointers.iter().filter_map(|pointer| at(pointer)).max();
    let either = |member: &str| {
        let usual = count(&[
            &format!("/usage/{member}"),
            &format!("/response/usage/{member}"),
        ]);
        usual.max(at(&format!("/message/usage/{member}")))
    };
    let usual = |member: &str| {
        count(&[
            &format!("/usage/{member}"),
            &format!("/response/usage/{member}"),
        ])
    };
    let cached = usual("prompt_tokens_details/cached_tokens")
        .max(usual("input_tokens_details/cached_tokens"))
        .unwrap_or_default();
    let read = either("cache_read_input_tokens").unwrap_or_default();
    let created = either("cache_creation_input_tokens").unwrap_or_default();
    let (prompt, completion) = (usual("prompt_tokens"), usual("completion_tokens"));
    if prompt.or(completion).is_some() {
        let cached = cached.max(read);
        let prompt = prompt.unwrap_or_default();
        return tokens(
            prompt.saturating_sub(cached),
            cached,
            completion.unwrap_or_default(),
        );
    }
    let (input, output) = (either("input_tokens"), either("output_tokens"));
    input.or(output)?;
    tokens(
        input.unwrap_or_default().saturating_sub(cached) + created,
        cached + read,
        output.unwrap_or_default(),
    )
}

fn documents() -> impl Strategy<Value = Value> {
    let name = prop::sample::select(vec![
        "usage",
        "response",
        "message",
        "prompt_tokens",
        "completion_tokens",
        "input_tokens",
        "output_tokens",
        "prompt_tokens_details",
        "input_tokens_details",
        "cached_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
        "content",
        "a",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        (0_u64..2_000).prop_map(|number| json!(number)),
        (-9_i64..9).prop_map(|number| json!(number)),
        (-9.0_f64..9.0).prop_map(|number| json!(number)),
        "[a\"\\\\:{}\\[\\],\\n\u{e9}]{0,6}".prop_map(Value::String),
    ];
    let value = leaf.prop_recursive(4, 60, 6, move |inner| {
        prop_oneof![
            1 => prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            5 => prop::collection::btree_map(name.clone(), inner, 0..8).prop_map(|map| {
                let members = map.into_iter();
                Value::Object(members.map(|(name, value)| (name.to_owned(), value)).collect())
            }),
        ]
    });
    value.prop_filter("a document", Value::is_object)
}

proptest! {
    #[test]
    fn the_usage_is_that_of_a_whole_document(document in documents(), is_pretty: bool) {
        let body = if is_pretty { format!("{document:#}") } else { document.to_string() };
        prop_assert_eq!(scan(&[body.as_bytes()]).usage(), naive(&document));
        let events: String = body.lines().map(|line| format!("data: {line}\n")).collect();
        prop_assert_eq!(scan(&[format!("{events}\n").as_bytes()]).usage(), naive(&document));
    }

    #[test]
    fn pieces_do_not_matter(
        documents in prop::collection::vec(documents(), 1..4),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        is_stream: bool,
        is_cut: bool,
    ) {
        let mut body: String = documents
            .iter()
            .map(|document| if is_stream { format!("data: {document}\r\n\r\n") } else { document.to_string() })
            .collect();
        if is_cut {
            while let Some(last) = body.pop() {
                if last == ':' { break; }
            }
        }
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(body.len() + 1)).collect();
        cuts.sort_unstable();
        let mut pieces = Vec::new();
        let mut start = 0;
        for cut in cuts {
            pieces.push(&body.as_bytes()[start..cut]);
            start = cut;
        }
        pieces.push(&body.as_bytes()[start..]);
        let (whole, cut) = (scan(&[body.as_bytes()]), scan(&pieces));
        prop_assert_eq!(whole.usage(), cut.usage());
        prop_assert_eq!(whole.usage_at_end(false), cut.usage_at_end(false));
        prop_assert_eq!(whole.was_clamped(), cut.was_clamped());
    }
}
