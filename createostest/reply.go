package createostest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
)

// success answers with a JSend success envelope.
func success(w http.ResponseWriter, status int, data any) {
	writeJSON(w, status, map[string]any{"status": "success", "data": data})
}

// fail answers with a JSend fail envelope. The payload is a plain text, or for
// a fieldError an object keyed by the field, as the provider does both.
func fail(w http.ResponseWriter, status int, reason any) {
	var field *fieldError
	if err, ok := reason.(error); ok {
		if errors.As(err, &field) {
			reason = map[string]string{field.field: field.message}
		} else {
			reason = err.Error()
		}
	}
	writeJSON(w, status, map[string]any{"status": "fail", "data": reason})
}

// failServer answers with a JSend error envelope, which is the form of 5xx.
func failServer(w http.ResponseWriter, status int, message string) {
	writeJSON(w, status, map[string]any{"status": "error", "message": message, "code": status})
}

// answer chooses the envelope that belongs to the status.
func answer(w http.ResponseWriter, status int, text string) {
	switch {
	case status >= 500:
		failServer(w, status, text)
	case status >= 400:
		fail(w, status, text)
	default:
		success(w, status, map[string]any{})
	}
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(value); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(buf.Len()))
	w.WriteHeader(status)
	w.Write(buf.Bytes()) // an error is the client's loss, not ours
}

// fieldError is a request that is wrong in one field.
type fieldError struct{ field, message string }

func (e *fieldError) Error() string { return e.field + ": " + e.message }

func badField(field, message string) error { return &fieldError{field, message} }

// decode reads a JSON request body into v. An empty body leaves v as it is.
func (s *Server) decode(r *http.Request, v any) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return badField("body", "cannot be read")
	}
	if len(bytes.TrimSpace(body)) == 0 {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	if s.opts.RejectUnknownFields {
		dec.DisallowUnknownFields()
	}
	if err := dec.Decode(v); err != nil {
		var wrong *json.UnmarshalTypeError
		if errors.As(err, &wrong) && wrong.Field != "" {
			return badField(wrong.Field, "must not be a "+wrong.Value)
		}
		return badField("body", "must be a JSON object of the known form")
	}
	return nil
}

// page is a window on a list.
type page struct{ limit, offset int }

const (
	defaultPageLimit = 50
	maxPageLimit     = 500
)

// parsePage reads limit and offset; too large a limit is clamped, not refused.
func parsePage(r *http.Request) (page, error) {
	limit, err := queryInt(r, "limit", defaultPageLimit)
	if err != nil {
		return page{}, err
	}
	offset, err := queryInt(r, "offset", 0)
	if err != nil {
		return page{}, err
	}
	if limit == 0 {
		limit = defaultPageLimit
	}
	return page{min(limit, maxPageLimit), offset}, nil
}

// queryInt reads a whole number of 0 or more.
func queryInt(r *http.Request, name string, missing int) (int, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return missing, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return 0, badField(name, "must be a whole number of 0 or more")
	}
	return n, nil
}

func paginate[T any](all []T, p page) map[string]any {
	from := min(p.offset, len(all))
	items := append([]T{}, all[from:min(from+p.limit, len(all))]...)
	return map[string]any{"data": items, "pagination": map[string]int{
		"total": len(all), "limit": p.limit, "offset": p.offset, "count": len(items),
	}}
}
