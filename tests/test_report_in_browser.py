"""The page of measurements as a reader sees it: in headless Chromium, from a file, offline."""

import os
import shutil

import pytest
from support.report import recorded, row
from support.tuning import arguments, problem, some_kernels

import kernel_api as ka
from kernel_api import report

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")

_SWITCHES = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


def program(*names):
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"there is no {' or '.join(names)}; install Chromium and its ChromeDriver")
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = program("chromium", "chromium-browser", "google-chrome")
    for switch in _SWITCHES:
        options.add_argument(switch)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    if os.geteuid() == 0:  # Chromium's sandbox refuses to be run by root
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(program("chromedriver", "chromium.chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def rows():
    kernels = some_kernels()
    evil = "</td><script>document.title = 'taken'</script><img src=x onerror='document.title = 1'>"
    (torch,) = ka.get_kernels(arguments(), cc=90, providers=["torch"])
    times = [(kernels[0], 101.0), (kernels[1], 9.5), (torch, 20.25)]
    return [
        *recorded(3),
        *(row(kernel, problem(), time) for kernel, time in times),
        row(kernels[2], problem(), status="WRONG", message=evil),
    ]


@pytest.fixture(scope="module")
def file(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write(path, rows)
    return path


@pytest.fixture
def opened(browser, file):
    """The page, opened anew, without anything to complain of."""
    browser.get(file.as_uri())
    yield browser
    assert browser.get_log("browser") == []
    assert browser.title == "kernel-api: tuning report"


def cells(browser, table, column, *, shown=True):
    """Text of the cells of a column from top to bottom, of those that can be seen."""
    return browser.execute_script(
        """
        const [selector, column, shown] = arguments;
        const table = document.querySelector(selector);
        const th = table.querySelector(`th[data-column="${column}"]`);
        return [...table.tBodies[0].rows]
          .filter((row) => !shown || row.checkVisibility({contentVisibilityAuto: false}))
          .map((row) => row.cells[th.cellIndex].textContent);
        """,
        table,
        column,
        shown,
    )


def show(browser, element):
    """Bring it to where nothing lies above it."""
    browser.execute_script(
        "arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element
    )


def press(browser, table, column):
    """Click a header as a reader does; returns what it then says of the order."""
    th = browser.find_element("css selector", f'{table} th[data-column="{column}"]')
    show(browser, th)
    th.find_element("tag name", "button").click()
    return th.get_attribute("aria-sort")


def type_in(browser, text):
    """Into the search box; returns what it says is left."""
    box = browser.find_element("id", "search")
    box.clear()
    box.send_keys(text)
    # The rows are filtered before the next picture.
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    return browser.find_element("id", "shown").text


def candidates_of(key):
    return f'[id="problem-{key}"] table'


def key_of(rows, what):
    return next(
        f"{r.environment.digest[:8]}-{r.measurement.problem.digest}"
        for r in rows
        if r.measurement.problem == what
    )


def test_every_row_can_be_seen(opened, rows):
    seen = opened.execute_script(
        "return [...document.querySelectorAll('tr.candidate')]"
        ".filter((row) => row.checkVisibility() && row.getBoundingClientRect().height > 0).length"
    )
    assert seen == len(rows)
    assert opened.find_element("id", "shown").text == f"{len(rows)} rows"
    assert len(cells(opened, "#summary", "problem")) == 4


def test_nothing_is_fetched_and_no_text_runs(opened):
    fetched = opened.execute_script("return performance.getEntriesByType('resource').length")
    assert fetched == 0
    assert len(opened.find_elements("tag name", "img")) == 0


def test_numbers_are_sorted_as_numbers(opened, rows):
    table = candidates_of(key_of(rows, problem()))
    assert cells(opened, table, "time") == ["9.50", "20.25", "101.0", ""]
    assert press(opened, table, "time") == "ascending"
    assert cells(opened, table, "time") == ["9.50", "20.25", "101.0", ""]
    assert press(opened, table, "time") == "descending"
    assert cells(opened, table, "time") == ["101.0", "20.25", "9.50", ""]
    assert press(opened, table, "status") == "ascending"
    assert cells(opened, table, "status")[-1] == "WRONG"
    assert (
        opened.find_element("css selector", f'{table} th[data-column="time"]').get_attribute(
            "aria-sort"
        )
        == "none"
    )


def test_shapes_are_sorted_by_the_numbers_in_them(opened, rows):
    table = candidates_of(key_of(rows, rows[0].measurement.problem))
    assert press(opened, table, "axis-tile_shape") == "ascending"
    shapes = [
        tuple(map(int, one.split("x"))) for one in cells(opened, table, "axis-tile_shape") if one
    ]
    assert len(set(shapes)) > 5
    assert shapes == sorted(shapes)
    assert cells(opened, table, "axis-tile_shape")[-1] == ""


def test_every_column_of_the_summary_can_be_sorted(opened):
    names = opened.execute_script(
        "return [...document.querySelectorAll('#summary th')].map((th) => th.dataset.column)"
    )
    for name in names:
        before = sorted(cells(opened, "#summary", name))
        assert press(opened, "#summary", name) == "ascending"
        up = [one for one in cells(opened, "#summary", name) if one]
        assert press(opened, "#summary", name) == "descending"
        down = [one for one in cells(opened, "#summary", name) if one]
        assert up == down[::-1] or len(set(up)) < len(up)
        assert sorted(cells(opened, "#summary", name)) == before


def test_sorting_works_from_the_keyboard(opened):
    button = opened.find_element("css selector", '#summary th[data-column="size-M"] button')
    button.send_keys("\n")
    found = list(map(int, cells(opened, "#summary", "size-M")))
    assert found == sorted(found)


def test_the_search_box_filters_the_rows_of_all_tables(opened, rows):
    table = candidates_of(key_of(rows, rows[0].measurement.problem))
    wrong = sum(r.measurement.status == "WRONG" for r in rows)
    assert type_in(opened, "wrong") == f"{wrong} of {len(rows)} rows"
    assert cells(opened, table, "status") == ["WRONG"]
    assert type_in(opened, "sm80_gemm tile16x64x64") != f"{len(rows)} rows"
    assert all("tile16x64x64" in one for one in cells(opened, table, "kernel"))
    assert cells(opened, table, "kernel")
    assert type_in(opened, "this is nowhere") == f"0 of {len(rows)} rows"
    assert cells(opened, "#summary", "problem") == []
    assert not opened.find_element("css selector", "details").is_displayed()
    assert type_in(opened, "M=256 n=512").startswith("4 of ")
    opened.find_element("id", "search").send_keys("\ue00c")  # Escape
    assert opened.find_element("id", "shown").text == f"{len(rows)} rows"


def test_a_status_in_the_header_filters_by_it(opened, rows):
    opened.find_element("css selector", 'button[data-search="TIMEOUT"]').click()
    expected = sum(r.measurement.status == "TIMEOUT" for r in rows)
    assert opened.find_element("id", "shown").text == f"{expected} of {len(rows)} rows"
    opened.find_element("css selector", 'button[data-search="TIMEOUT"]').click()
    assert opened.find_element("id", "shown").text == f"{len(rows)} rows"


def test_sections_close_open_and_are_linked(opened, rows):
    toggle = opened.find_element("id", "toggle-all")
    key = key_of(rows, problem())
    table = candidates_of(key)
    link = opened.find_element("css selector", f'#summary a[href="#problem-{key}"]')
    for _ in range(2):  # the second time the page is there already
        show(opened, toggle)
        toggle.click()
        assert cells(opened, table, "time") == []
        show(opened, link)
        link.click()
        assert len(cells(opened, table, "time")) == 4
        toggle.click()
        assert toggle.text == "collapse all"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_readers_colours(opened, scheme, tmp_path):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    colour = opened.execute_script(
        "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (sum(colour) > 600) == (scheme == "light")
    wide = opened.execute_script("return document.documentElement.scrollWidth > innerWidth")
    assert not wide
    picture = tmp_path / f"{scheme}.png"
    assert opened.save_screenshot(str(picture))
    assert picture.stat().st_size > 20_000
