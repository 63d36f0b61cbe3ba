package inject

import (
	"fmt"
	"io"
	"log/slog"
)

// printed is what every form of a value prints as.
const printed = "[secret]"

// Format implements [fmt.Formatter]: no verb prints a value.
func (Value) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, printed) }

// String implements [fmt.Stringer].
func (Value) String() string { return printed }

// GoString implements [fmt.GoStringer].
func (Value) GoString() string { return printed }

// LogValue implements [slog.LogValuer].
func (Value) LogValue() slog.Value { return slog.StringValue(printed) }

// MarshalJSON implements [json.Marshaler].
func (Value) MarshalJSON() ([]byte, error) { return []byte(`"` + printed + `"`), nil }

// Wipe overwrites the value. Whoever opened it calls it when the request has been
// sent.
func (v Value) Wipe() {
	clear(v.Value)
	clear(v.SessionToken)
}
