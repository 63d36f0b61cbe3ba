import java.io.BufferedOutputStream;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileInputStream;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import jdk.jshell.DeclarationSnippet;
import jdk.jshell.Diag;
import jdk.jshell.EvalException;
import jdk.jshell.JShell;
import jdk.jshell.JShellException;
import jdk.jshell.Snippet;
import jdk.jshell.SnippetEvent;
import jdk.jshell.SourceCodeAnalysis;
import jdk.jshell.UnresolvedReferenceException;
import jdk.jshell.VarSnippet;
import jdk.jshell.execution.LocalExecutionControlProvider;
import sun.misc.Signal;

/**
 * One Java context of the code interpreter: JShell, in this process.
 *
 * <p>It speaks to server.py as kernel.py does: commands on descriptor 3, events on 4, both JSON
 * lines. What the code prints goes straight into the pipes 1 and 2. One thread reads the commands,
 * so that there is somebody to hear an interrupt; the main thread runs the cells.
 *
 * <p>A cell is split into the snippets that JShell knows. The value of the last one is the result,
 * if it is an expression. The variables of the environment are system properties, too: that is
 * where E2B puts them.
 */
public final class Kernel {
    private static final String IMPORTS =
            "java.io java.math java.net java.nio.file java.util java.util.concurrent java.util.function java.util.regex"
                    + " java.util.stream";
    private static final int MAX_FRAMES = 50;

    private final OutputStream events = new FileOutputStream("/proc/self/fd/4");
    private final LinkedBlockingQueue<Map<String, Object>> commands = new LinkedBlockingQueue<>();
    private final JShell shell =
            JShell.builder().executionEngine(new LocalExecutionControlProvider(), Map.of()).idGenerator((s, i) -> "" + i).build();
    private Map<String, Object> base = Map.of();
    private int count;
    private volatile boolean running;
    private volatile boolean interrupted;

    private Kernel() throws IOException {}

    public static void main(String[] args) throws Exception {
        // They flush at each line; flusher sees to what does not end in one.
        System.setOut(new PrintStream(new BufferedOutputStream(new FileOutputStream(FileDescriptor.out), 8192), true, "UTF-8"));
        // For the programs that a cell has started.
        Signal.handle(new Signal("INT"), n -> {});
        System.setErr(new PrintStream(new BufferedOutputStream(new FileOutputStream(FileDescriptor.err), 8192), true, "UTF-8"));
        new Kernel().serve();
    }

    private void serve() throws Exception {
        for (String p : IMPORTS.split(" ")) {
            shell.eval("import " + p + ".*;");
        }
        Thread reader = new Thread(this::read, "postern-commands");
        reader.setDaemon(true);
        reader.start();
        Thread flusher = new Thread(this::flush, "postern-flush");
        flusher.setDaemon(true);
        flusher.start();
        send("ready");
        while (true) {
            Map<String, Object> c = commands.take();
            if ("run".equals(c.get("op"))) {
                run(c);
            } else if (c.get("silent") == null) {
                send("done"); // reseed: SecureRandom asks the system, and the others cannot be told
            }
        }
    }

    private void read() {
        try (BufferedReader in =
                new BufferedReader(new InputStreamReader(new FileInputStream("/proc/self/fd/3"), StandardCharsets.UTF_8))) {
            for (String line; (line = in.readLine()) != null; ) {
                Map<String, Object> c = object(line);
                if (!"interrupt".equals(c.get("op"))) {
                    commands.add(c);
                } else if (running) {
                    interrupted = true;
                    shell.stop();
                }
            }
        } catch (IOException e) {
            // The server has gone.
        }
        Runtime.getRuntime().halt(1);
    }

    private void flush() {
        try {
            while (true) {
                Thread.sleep(200);
                System.out.flush();
                System.err.flush();
            }
        } catch (InterruptedException e) {
            // Nobody interrupts it.
        }
    }

    private void run(Map<String, Object> c) throws IOException {
        send("busy");
        event("count", "n", ++count);
        Map<String, Object> wanted = map(c.get("base"));
        Map<String, Object> call = map(c.get("call"));
        for (String k : base.keySet()) {
            if (!wanted.containsKey(k)) {
                set(k, null, null);
            }
        }
        if (!wanted.equals(base)) {
            wanted.forEach((k, v) -> set(k, (String) v, (String) v));
        }
        base = wanted;
        Map<String, String[]> saved = new HashMap<>();
        call.forEach((k, v) -> {
            saved.put(k, new String[] {System.getProperty(k), System.getenv(k)});
            set(k, (String) v, (String) v);
        });
        interrupted = false;
        running = true;
        try {
            cell((String) c.get("code"));
        } catch (Throwable e) { // of JShell's own, or an interrupt that came between two snippets
            error(e.getClass().getSimpleName(), String.valueOf(e.getMessage()), e.toString());
        } finally {
            running = false;
            saved.forEach((k, v) -> set(k, v[0], v[1]));
        }
        System.out.flush();
        System.err.flush();
        send("done");
    }

    private void cell(String code) throws IOException {
        SourceCodeAnalysis analysis = shell.sourceCodeAnalysis();
        String result = null;
        for (String rest = code; !rest.isBlank() && !interrupted; ) {
            SourceCodeAnalysis.CompletionInfo info = analysis.analyzeCompletion(rest);
            String source = info.source() == null ? rest : info.source();
            String remaining = info.remaining() == null ? "" : info.remaining();
            if (source.isBlank() || remaining.length() >= rest.length()) {
                break; // only a comment is left
            }
            rest = info.source() == null ? "" : remaining;
            result = null;
            for (SnippetEvent e : shell.eval(source)) {
                if (e.causeSnippet() != null) {
                    continue; // an earlier snippet that this one changed
                }
                if (interrupted) {
                    break;
                }
                if (e.exception() != null) {
                    thrown(e.exception());
                    return;
                }
                if (e.status() == Snippet.Status.REJECTED || e.status() == Snippet.Status.RECOVERABLE_NOT_DEFINED) {
                    rejected(e.snippet(), source);
                    return;
                }
                if (expression(e.snippet()) && e.value() != null && !e.value().isEmpty()) {
                    result = e.value();
                }
            }
        }
        System.out.flush();
        System.err.flush();
        if (interrupted) {
            error("KeyboardInterrupt", "the execution was interrupted", "");
        } else if (result != null) {
            emit("{\"t\":\"result\",\"main\":true,\"data\":{\"text/plain\":" + quoted(result) + "}}");
        }
    }

    private static boolean expression(Snippet s) {
        return s.kind() == Snippet.Kind.EXPRESSION
                || s instanceof VarSnippet && s.subKind() == Snippet.SubKind.TEMP_VAR_EXPRESSION_SUBKIND;
    }

    private void thrown(JShellException e) throws IOException {
        System.out.flush();
        System.err.flush();
        if (e instanceof UnresolvedReferenceException) {
            Snippet s = ((UnresolvedReferenceException) e).getSnippet();
            rejected(s, s.source());
            return;
        }
        StringBuilder trace = new StringBuilder();
        String name = "Exception";
        String value = "";
        for (Throwable t = e; t != null; t = t.getCause()) {
            String kind = t instanceof EvalException ? ((EvalException) t).getExceptionClassName() : t.getClass().getName();
            String message = t.getMessage() == null ? "" : t.getMessage();
            if (t == e) {
                name = kind.substring(kind.lastIndexOf('.') + 1);
                value = message;
            }
            trace.append(t == e ? "" : "\nCaused by: ").append(kind).append(message.isEmpty() ? "" : ": ").append(message);
            int frames = 0;
            for (StackTraceElement f : t.getStackTrace()) {
                if (f.getClassName().startsWith("jdk.jshell.") || frames++ == MAX_FRAMES) {
                    break;
                }
                // The file of what was compiled here is a snippet's number.
                boolean ours = f.getFileName() != null && f.getFileName().startsWith("#");
                trace.append("\n    at ");
                if (!ours) {
                    trace.append(f);
                } else {
                    trace.append(f.getMethodName().isEmpty() ? "the cell" : f.getMethodName()).append(", line ").append(f.getLineNumber());
                }
            }
        }
        error(name, value, trace.toString());
    }

    private void rejected(Snippet s, String source) throws IOException {
        StringBuilder text = new StringBuilder();
        String first = null;
        for (Diag d : (Iterable<Diag>) shell.diagnostics(s)::iterator) {
            if (!d.isError()) {
                continue;
            }
            String message = d.getMessage(Locale.ROOT);
            if (first == null) {
                // "cannot find symbol" has the name in its second line.
                first = message.lines().limit(message.contains("symbol:") ? 2 : 1).map(String::strip).collect(Collectors.joining(", "));
            }
            int at = (int) Math.max(0, Math.min(d.getPosition(), source.length()));
            int from = source.lastIndexOf('\n', at - 1) + 1;
            int to = source.indexOf('\n', at);
            String line = source.substring(from, to < 0 ? source.length() : to);
            text.append("error: ").append(message).append('\n').append(line).append('\n').append(" ".repeat(at - from)).append("^\n");
        }
        Stream<String> missing = s instanceof DeclarationSnippet ? shell.unresolvedDependencies((DeclarationSnippet) s) : Stream.empty();
        for (String u : (Iterable<String>) missing::iterator) {
            first = first == null ? "cannot find " + u : first;
            text.append("error: cannot find ").append(u).append('\n');
        }
        error("CompilationError", first == null ? "the code cannot be compiled" : first, text.toString());
    }

    /** Sets a system property and an environment variable; null removes them. */
    private static void set(String name, String property, String variable) {
        if (property == null) {
            System.clearProperty(name);
        } else {
            System.setProperty(name, property);
        }
        try {
            // Java has no way to set one. Its maps are opened to us by --add-opens.
            var field = System.getenv().getClass().getDeclaredField("m");
            field.setAccessible(true);
            @SuppressWarnings("unchecked")
            Map<String, String> env = (Map<String, String>) field.get(System.getenv());
            if (variable == null) {
                env.remove(name);
            } else {
                env.put(name, variable);
            }
        } catch (ReflectiveOperationException | RuntimeException e) {
            // Another Java: then only the property is set.
        }
    }

    private void send(String kind) throws IOException {
        emit("{\"t\":\"" + kind + "\"}");
    }

    private void event(String kind, String key, int n) throws IOException {
        emit("{\"t\":\"" + kind + "\",\"" + key + "\":" + n + "}");
    }

    private void error(String name, String value, String traceback) throws IOException {
        emit("{\"t\":\"error\",\"name\":" + quoted(name) + ",\"value\":" + quoted(value) + ",\"traceback\":" + quoted(traceback) + "}");
    }

    private synchronized void emit(String line) throws IOException {
        events.write((line + "\n").getBytes(StandardCharsets.US_ASCII));
    }

    private static String quoted(String s) {
        StringBuilder b = new StringBuilder("\"");
        for (int i = 0; i < s.length(); i++) {
            char c = s.charAt(i);
            if (c == '"' || c == '\\') {
                b.append('\\').append(c);
            } else if (c < 32 || c > 126) {
                b.append(String.format("\\u%04x", (int) c));
            } else {
                b.append(c);
            }
        }
        return b.append('"').toString();
    }

    @SuppressWarnings("unchecked")
    private static Map<String, Object> map(Object v) {
        return v instanceof Map ? (Map<String, Object>) v : Map.of();
    }

    // A parser for what the server sends: objects of texts, numbers, true, false, null.

    private static Map<String, Object> object(String text) {
        int[] at = {0};
        return map(value(text, at));
    }

    private static Object value(String s, int[] at) {
        skip(s, at);
        char c = s.charAt(at[0]);
        if (c == '{') {
            Map<String, Object> out = new HashMap<>();
            at[0]++;
            for (skip(s, at); s.charAt(at[0]) != '}'; skip(s, at)) {
                String k = text(s, at);
                skip(s, at);
                at[0]++; // the colon
                out.put(k, value(s, at));
                skip(s, at);
                if (s.charAt(at[0]) == ',') {
                    at[0]++;
                }
            }
            at[0]++;
            return out;
        }
        if (c == '"') {
            return text(s, at);
        }
        int from = at[0];
        while (at[0] < s.length() && ",}] ".indexOf(s.charAt(at[0])) < 0) {
            at[0]++;
        }
        String word = s.substring(from, at[0]);
        return word.equals("null") || word.equals("false") ? null : word;
    }

    private static String text(String s, int[] at) {
        StringBuilder b = new StringBuilder();
        skip(s, at);
        for (at[0]++; s.charAt(at[0]) != '"'; at[0]++) {
            char c = s.charAt(at[0]);
            if (c == '\\') {
                c = s.charAt(++at[0]);
                int i = "nrtbf".indexOf(c);
                if (i >= 0) {
                    c = "\n\r\t\b\f".charAt(i);
                } else if (c == 'u') {
                    c = (char) Integer.parseInt(s.substring(at[0] + 1, at[0] + 5), 16);
                    at[0] += 4;
                }
            }
            b.append(c);
        }
        at[0]++;
        return b.toString();
    }

    private static void skip(String s, int[] at) {
        while (at[0] < s.length() && s.charAt(at[0]) <= ' ') {
            at[0]++;
        }
    }
}
