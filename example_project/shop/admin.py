from django.contrib import admin

from .models import ImportRun, Order, StockItem

admin.site.site_header = "Example shop"


@admin.register(StockItem)
class StockItemAdmin(admin.ModelAdmin):
    list_display = ["sku", "name", "price", "stock"]
    search_fields = ["sku", "name"]


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ["created", "item", "buyer", "price"]
    list_select_related = ["item", "buyer"]


@admin.register(ImportRun)
class ImportRunAdmin(admin.ModelAdmin):
    list_display = ["started", "finished", "rows", "worker_pid", "task_id"]
