package e2bapi

import (
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/sandbox"
)

// metric is a sample in JSON.
type metric struct {
	Timestamp     string  `json:"timestamp"`
	TimestampUnix int64   `json:"timestampUnix"`
	CPUCount      int64   `json:"cpuCount"`
	CPUUsedPct    float64 `json:"cpuUsedPct"`
	MemUsed       int64   `json:"memUsed"`
	MemTotal      int64   `json:"memTotal"`
	MemCache      int64   `json:"memCache"`
	DiskUsed      int64   `json:"diskUsed"`
	DiskTotal     int64   `json:"diskTotal"`
}

func metricOf(m sandbox.Sample) metric {
	return metric{
		Timestamp: m.At.Format(time.RFC3339Nano), TimestampUnix: m.At.Unix(), CPUCount: int64(math.Ceil(m.CPUs)),
		CPUUsedPct: math.Round(m.CPUPercent*100) / 100, MemUsed: m.MemoryUsed, MemTotal: m.MemoryTotal, DiskUsed: m.DiskUsed, DiskTotal: m.DiskTotal,
	}
}

// interval returns the query's start and end, in seconds since 1970. The whole
// second of end is included.
func interval(q url.Values) (start, end time.Time, err error) {
	for name, t := range map[string]*time.Time{"start": &start, "end": &end} {
		n, err := number(q, name, -1, 0, 1<<40)
		if err != nil {
			return start, end, err
		}
		if n >= 0 {
			*t = time.Unix(n, 0)
		}
	}
	if !end.IsZero() && end.Before(start) || end.IsZero() && start.After(time.Now()) {
		return start, end, fmt.Errorf("%w: Invalid time range for metrics: start: must not be after end, or now", errRequest)
	}
	if !end.IsZero() {
		end = end.Add(time.Second - 1)
	}
	return start, end, nil
}

// sandboxMetrics answers with the samples of one sandbox.
func (s *Server) sandboxMetrics(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	start, end, err := interval(r.URL.Query())
	if err != nil {
		return err
	}
	samples, err := s.conf.Metrics.Samples(r.Context(), who, shortID(r.PathValue("id")), start, end)
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, each(samples, metricOf))
	return nil
}

// sandboxesMetrics answers with the newest sample of each of several sandboxes.
func (s *Server) sandboxesMetrics(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var ids []string
	for _, v := range r.URL.Query()["sandbox_ids"] {
		for id := range strings.SplitSeq(v, ",") {
			if id = strings.TrimSpace(id); id != "" {
				ids = append(ids, shortID(id))
			}
		}
	}
	if len(ids) == 0 || len(ids) > 100 {
		return fmt.Errorf("%w: sandbox_ids: must name 1 to 100 sandboxes, not %d", errRequest, len(ids))
	}
	samples, err := s.conf.Metrics.Newest(who, ids)
	if err != nil {
		return err
	}
	out := map[string]metric{}
	for id, m := range samples {
		out[id] = metricOf(m)
	}
	reply(w, http.StatusOK, map[string]any{"sandboxes": out})
	return nil
}
