package mailapi

import (
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// each returns what f makes of each element of in. It is never nil: clients
// expect an empty list to be one.
func each[In, Out any](in []In, f func(In) Out) []Out {
	out := make([]Out, len(in))
	for i := range in {
		out[i] = f(in[i])
	}
	return out
}

// onlyParameters refuses a query with parameters that this version does not
// know: who filters by one believes that nothing else was left.
func onlyParameters(q url.Values, names ...string) error {
	for _, name := range slices.Sorted(maps.Keys(q)) {
		if !slices.Contains(names, name) {
			return fmt.Errorf("%w: query: unknown parameter %q, want some of %s", errRequest, name[:min(len(name), 60)], strings.Join(names, ", "))
		}
	}
	return nil
}

// limit returns the query's limit.
func limit(q url.Values, unset, most int) (int, error) {
	if !q.Has("limit") {
		return unset, nil
	}
	n, err := strconv.Atoi(q.Get("limit"))
	if err != nil || n < 1 || n > most {
		return 0, fmt.Errorf("%w: limit: must be 1 to %d", errRequest, most)
	}
	return n, nil
}
