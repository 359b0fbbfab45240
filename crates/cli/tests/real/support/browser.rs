//! A Chromium browser that is controlled over a pipe with the DevTools protocol.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{Scratch, tool};

/// The timeout for conditions that, on an idle machine, become true within a second.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A browser with one open page. The browser is stopped when the test ends.
#[derive(Debug)]
pub(crate) struct Browser {
    child: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    last_id: u64,
    session: String,
    /// The messages that the page has logged: errors, and Content-Security-Policy violations.
    logged: Vec<String>,
    _scratch: Scratch,
}

impl Browser {
    pub(crate) fn start() -> Self {
        let scratch = Scratch::new();
        // The protocol uses the file descriptors 3 and 4.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null", "sh"])
            .arg(tool("chromium"))
            .args(["--headless=new", "--remote-debugging-pipe"])
            // Chromium's sandbox does not work for root, for example in a container. Disabling the
            // sandbox is safe, because the browser opens only the tests' own pages.
            .args(["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--disable-sync", "--disable-extensions"])
            .args([
                "--disable-background-networking",
                "--disable-component-update",
            ])
            .arg(format!("--user-data-dir={}", scratch.path().display()))
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start chromium: {error}; run scripts/setup"));
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (send, messages) = channel();
        std::thread::spawn(move || {
            output
                .split(0)
                .map_while(Result::ok)
                // If the browser is killed while it writes a message, this last message is
                // incomplete.
                .map_while(|message| serde_json::from_slice(&message).ok())
                .take_while(|message: &Value| send.send(message.clone()).is_ok())
                .for_each(drop);
        });
        let mut browser = Self {
            child,
            input,
            messages,
            last_id: 0,
            session: String::new(),
            logged: Vec::new(),
            _scratch: scratch,
        };
        let target = browser.call("Target.createTarget", &json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", &attach);
        browser.session = attached["sessionId"].as_str().unwrap().to_owned();
        for domain in ["Page", "Runtime", "Log"] {
            browser.call(&format!("{domain}.enable"), &json!({}));
        }
        browser
    }

    /// Calls a protocol method and returns its result.
    pub(crate) fn call(&mut self, method: &str, parameters: &Value) -> Value {
        self.try_call(method, parameters)
            .unwrap_or_else(|error| panic!("{method} {parameters}: {error}"))
    }

    /// Calls a protocol method and returns its result, or the error of the browser.
    fn try_call(&mut self, method: &str, parameters: &Value) -> Result<Value, Value> {
        self.last_id += 1;
        let id = self.last_id;
        let mut message = json!({"id": id, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.as_str().into();
        }
        self.input
            .write_all(format!("{message}\0").as_bytes())
            .unwrap();
        loop {
            let received = self.messages.recv_timeout(TIMEOUT);
            let mut received = received.unwrap_or_else(|_| panic!("no result of {message}"));
            if received["id"] == id {
                return match received["error"].take() {
                    Value::Null => Ok(received["result"].take()),
                    error => Err(error),
                };
            }
            self.note_event(&received);
        }
    }

    fn note_event(&mut self, event: &Value) {
        let parameters = &event["params"];
        let logged = match event["method"].as_str() {
            Some("Log.entryAdded") if parameters["entry"]["level"] == "error" => {
                parameters["entry"]["text"].as_str().map(str::to_owned)
            }
            Some("Runtime.exceptionThrown") => Some(parameters["exceptionDetails"].to_string()),
            _ => None,
        };
        self.logged.extend(logged);
    }

    /// Takes and returns the messages that the page has logged so far.
    pub(crate) fn take_logged(&mut self) -> Vec<String> {
        // Events and results arrive in order. When the result of this command has arrived, all
        // earlier events have arrived too.
        self.eval("0");
        std::mem::take(&mut self.logged)
    }

    pub(crate) fn open(&mut self, url: &str) {
        self.call("Page.navigate", &json!({"url": url}));
    }

    /// Runs `script` in each page before the page's own scripts.
    pub(crate) fn run_in_new_pages(&mut self, script: &str) {
        let script = json!({"source": script});
        self.call("Page.addScriptToEvaluateOnNewDocument", &script);
    }

    /// Sets the page size in pixels, and the colour scheme: `light` or `dark`.
    pub(crate) fn show_as(&mut self, (width, height): (u32, u32), scheme: &str) {
        let size = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500});
        self.call("Emulation.setDeviceMetricsOverride", &size);
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.call("Emulation.setEmulatedMedia", &json!({"features": features}));
    }

    /// Returns the value of a JavaScript expression. If the value is a promise, awaits it.
    pub(crate) fn eval(&mut self, expression: &str) -> Value {
        self.try_eval(expression)
            .unwrap_or_else(|error| panic!("{expression}: {error}"))
    }

    /// Returns the value of a JavaScript expression, or the error of the browser, which cannot
    /// evaluate an expression while the page changes.
    fn try_eval(&mut self, expression: &str) -> Result<Value, Value> {
        let parameters =
            json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut result = self.try_call("Runtime.evaluate", &parameters)?;
        let exception = &result["exceptionDetails"];
        assert_eq!(exception, &Value::Null, "{expression}");
        Ok(result["result"]["value"].take())
    }

    /// Waits until a JavaScript expression is true.
    #[expect(
        clippy::disallowed_methods,
        reason = "a browser has its own clock, and cannot be waited for otherwise"
    )]
    pub(crate) fn wait_until(&mut self, expression: &str) {
        let deadline = Instant::now() + TIMEOUT;
        // During navigation, the page or the element may not exist yet, so an exception and an
        // error of the browser are treated as false.
        let tried = format!(
            "(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        );
        while self.try_eval(&tried).ok() != Some(Value::Bool(true)) {
            if Instant::now() > deadline {
                let shown = self.text();
                panic!(
                    "never: {expression}; the page shows:\n{shown}\n{:?}",
                    self.logged
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the page shows `text`.
    pub(crate) fn wait_for(&mut self, text: &str) {
        self.wait_until(&format!(
            "document.body.innerText.includes({})",
            json!(text)
        ));
    }

    /// Returns the text that the page shows.
    pub(crate) fn text(&mut self) -> String {
        let text = self.eval("document.body.innerText");
        text.as_str().unwrap_or_default().to_owned()
    }

    /// Waits for a visible button or link with this text, and clicks the first one. Links in the
    /// navigation bar are ignored.
    pub(crate) fn click(&mut self, text: &str) {
        // The page may redraw between two expressions, so a single expression finds and clicks the
        // element.
        self.wait_until(&format!(
            "[...document.querySelectorAll('dialog button, main :is(button, a), .bar button')]\
             .some((node) => node.textContent === {} && node.checkVisibility() \
             && (node.click(), true))",
            json!(text)
        ));
    }

    /// Sets the value of an input or a selection, as a user would.
    pub(crate) fn fill(&mut self, selector: &str, value: &str) {
        let (selector, value) = (json!(selector), json!(value));
        self.wait_until(&format!(
            "(() => {{ const node = document.querySelector({selector}); node.value = {value}; \
             return node.dispatchEvent(new Event('change', {{bubbles: true}})); }})()"
        ));
    }

    /// Presses a key.
    pub(crate) fn press(&mut self, key: &str) {
        let text = if key == "Enter" { "\r" } else { "" };
        for kind in ["keyDown", "keyUp"] {
            let event = json!({"type": kind, "key": key, "code": key, "text": text,
                "windowsVirtualKeyCode": match key { "Enter" => 13, "Tab" => 9, "Escape" => 27, _ => 0 }});
            self.call("Input.dispatchKeyEvent", &event);
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
